"""What can go wrong in the store, as a small tree whose reasons are counter labels.

Every error carries a :class:`Reason`. Its value is a stable word: the connector counts it,
the ``sparkcache`` command prints it, and ``docs/format.md`` lists it. Low-level errors
(``OSError``, ``sqlite3.Error``, ``struct.error``) never cross the package's boundary; they
are wrapped where they happen, by :func:`reason_of` when only ``errno`` knows why.
"""

from __future__ import annotations

import errno
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Why a root was not served, or a publication not taken."""

    # misses
    ABSENT = "absent"
    """No manifest under this identity and context."""
    PACK_MISSING = "pack-missing"
    """The manifest is whole, a pack it names is not there."""
    MALFORMED = "malformed"
    """The bytes are not a manifest or a pack of this format."""
    NEWER_FORMAT = "newer-format"
    """Written by a newer release; left alone."""
    UNKNOWN_KEY = "unknown-key"
    """Authenticated by a key that is not in the key ring."""
    FORGED = "forged"
    """The authentication tag does not match the bytes."""
    MISPLACED = "misplaced"
    """A whole manifest or pack under a name that is not its own."""
    TRUNCATED = "truncated"
    """A pack's size is not the one its manifest states."""
    PAGE_MISMATCH = "page-mismatch"
    """A page's bytes do not have the digest that the manifest states."""
    FOREIGN = "foreign"
    """A file or directory that is a link, not ours, or open to others."""
    QUARANTINED = "quarantined"
    """Taken out of service after wrong bytes were read."""
    # the machine, not the bytes
    DISK_ERROR = "disk-error"
    DISK_FULL = "disk-full"
    READ_ONLY = "read-only"
    DENIED = "denied"
    TOO_MANY_FILES = "too-many-files"
    NO_MEMORY = "no-memory"
    # ends of an operation that was stopped
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    CLOSED = "closed"
    # publications that are not taken
    INVALID = "invalid"
    """The caller's arguments contradict each other or the format's limits."""
    TOO_LARGE = "too-large"
    """One publication is larger than the whole capacity."""
    OWNED = "owned"
    """Another process owns this cache root."""
    UNSYNCED = "unsynced"
    """A sync failed, so what was written cannot be vouched for."""


WRONG_BYTES: Final = frozenset(
    {
        Reason.MALFORMED,
        Reason.FORGED,
        Reason.MISPLACED,
        Reason.TRUNCATED,
        Reason.PAGE_MISMATCH,
        Reason.PACK_MISSING,
    }
)
"""Reasons for which a root is taken out of service: its bytes are wrong, not the machine."""

LEFT_ALONE: Final = frozenset({Reason.NEWER_FORMAT, Reason.UNKNOWN_KEY, Reason.FOREIGN})
"""Reasons for which a root is not offered again but its files are not touched."""

PUBLISHING_STOPS: Final = frozenset(
    {Reason.DISK_FULL, Reason.READ_ONLY, Reason.DENIED, Reason.DISK_ERROR, Reason.UNSYNCED}
)
"""Reasons that turn publishing off for a while; restoring goes on."""

_ERRNO_REASONS: Final = {
    errno.ENOENT: Reason.ABSENT,
    errno.ENOSPC: Reason.DISK_FULL,
    errno.EDQUOT: Reason.DISK_FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
    errno.EMFILE: Reason.TOO_MANY_FILES,
    errno.ENFILE: Reason.TOO_MANY_FILES,
    errno.ENOMEM: Reason.NO_MEMORY,
    errno.ELOOP: Reason.FOREIGN,
    errno.ENOTDIR: Reason.FOREIGN,
}


def reason_of(error: OSError) -> Reason:
    """Return the reason that an operating system error stands for (``disk-error`` if unclear)."""
    return _ERRNO_REASONS.get(error.errno or 0, Reason.DISK_ERROR)


class StoreError(Exception):
    """Base of everything the store raises. ``reason`` is the counter label."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Miss(StoreError):  # noqa: N818 -- the field's word
    """A root is not served. The caller recomputes; nothing wrong was handed out.

    ``found`` says what was observed, ``subject`` which file or root it is about.
    """

    def __init__(self, reason: Reason, subject: str, found: str) -> None:
        super().__init__(reason, f"{subject}: {found} ({reason}); the context is recomputed")
        self.subject = subject
        self.found = found


class Refused(StoreError):  # noqa: N818 -- the field's word
    """A publication or a maintenance step was not done; what was stored before is untouched."""

    def __init__(self, reason: Reason, subject: str, found: str, next_step: str) -> None:
        super().__init__(reason, f"{subject}: {found} ({reason}); {next_step}")
        self.subject = subject
        self.found = found


class Unusable(StoreError):  # noqa: N818 -- the field's word
    """The cache root cannot be opened at all."""

    def __init__(self, reason: Reason, path: str, found: str, next_step: str) -> None:
        super().__init__(reason, f"cache root {path}: {found} ({reason}); {next_step}")
        self.path = path
        self.found = found


class Stopped(StoreError):  # noqa: N818 -- the field's word
    """A restore or publication ended by its deadline, its cancel event, or ``close``.

    It is raised only after every read and write of the operation has ended: no buffer of the
    caller is touched afterwards.
    """
