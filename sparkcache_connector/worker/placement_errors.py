"""What placement refuses, as types that a caller can decide on.

The classes mirror the statuses of ``csrc/include/sparkcache_placement.h``; the torch
fallback raises the same ones for the same reasons.
"""


class PlacementError(Exception):
    """Base of everything that placement raises; the message ends with what to do next."""


class PlacementArgumentError(PlacementError):
    """An argument that can never be right: null block, unknown group, span out of bounds."""


class PlacementStateError(PlacementError):
    """A call that the transaction's or the arena's state does not allow now."""


class CoverageError(PlacementError):
    """Destinations that overlap or repeat, or bytes that are missing or written twice."""


class UnverifiedPageError(PlacementError):
    """The digest computed over the arena is not the digest that the manifest names."""


class PlacementTimeoutError(PlacementError):
    """Not finished in time. Nothing was lost: wait again, or abort and drain."""


class PlacementDeviceError(PlacementError):
    """The device, its driver or an allocation failed; the stored bytes are not to blame."""


class PlacementUnavailableError(PlacementError):
    """No implementation can serve this configuration; raised at startup only."""
