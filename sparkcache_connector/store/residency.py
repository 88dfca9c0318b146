"""Whether a part of a file is in the page cache, asked without reading or waiting.

``preadv2(RWF_NOWAIT)`` would answer too, but since Linux 5.9 it starts reading ahead what is
missing, which a restore that goes past the page cache pays for twice.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

from sparkcache_connector.store.pack import ALIGNMENT

_SYSTEM_CALL: Final = 451
"""cachestat(2), Linux 6.5; one number on every architecture that has the common table."""
_KNOWN_MACHINES: Final = frozenset({"x86_64", "aarch64"})


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def _load() -> ctypes._NamedFuncPointer | None:
    if platform.machine() not in _KNOWN_MACHINES:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


_syscall = _load()


def is_resident(descriptor: int, offset: int, length: int) -> bool:
    """Return whether all of a range is in the page cache; False if the kernel does not tell."""
    if _syscall is None:
        return False
    where, counts = _Range(offset, length), _Counts()
    failed = _syscall(
        ctypes.c_long(_SYSTEM_CALL),
        ctypes.c_int(descriptor),
        ctypes.byref(where),
        ctypes.byref(counts),
        ctypes.c_uint(0),
    )
    return not failed and int(counts.cached) * ALIGNMENT >= length
