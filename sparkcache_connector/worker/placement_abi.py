"""The C ABI of the placement library, version 1, and how the library is loaded.

Mirrors ``csrc/include/sparkcache_placement.h``. :func:`load_library`

    (1) opens the file without following a symbolic link, and requires a regular file;
    (2) compares the SHA-256 of what that descriptor holds with the one demanded;
    (3) loads the library through that same descriptor;
    (4) asks for its ABI, and compares version and every structure's size,

so that no code of a library that is not the right one ever runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import threading
from ctypes import POINTER, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from struct import Struct

from .placement_errors import PlacementUnavailableError

ABI_VERSION = 1
ALL_POSITIONS = 2**64 - 1

OK = 0
INVALID_ARGUMENT = 1
INVALID_STATE = 2
COVERAGE = 3
UNVERIFIED = 4
NOT_READY = 5
NO_MEMORY = 6
UNSUPPORTED = 7
DEVICE = 8

BACKEND_HOST = 0
BACKEND_CUDA = 1

MESSAGE_BYTES = 512

# Arrays are packed rather than built of ctypes structures: several times faster, and a number
# that does not fit is an error instead of being cut.
PAGE = Struct("=QQII")
SEALED_PAGE = Struct("=QII32s")
SPAN = Struct("=QQQQ")
VERIFIED_PAGE = Struct("=QQ32s")
LAYER = Struct("=QQQQQQQII")
EXTENT = Struct("=QQQQQQ")


class Config(ctypes.Structure):
    """``sparkcache_config``."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("backend", c_uint32),
        ("arena_bytes", c_uint64),
        ("arena_count", c_uint32),
        ("host_threads", c_uint32),
        ("device", c_int32),
        ("transfer", c_uint32),
        ("fatbin", c_char_p),
        ("fatbin_bytes", c_uint64),
        ("reserved", c_uint64 * 2),
    )


class ArenaView(ctypes.Structure):
    """``sparkcache_arena``."""

    _fields_ = (("index", c_uint64), ("address", c_uint64), ("bytes", c_uint64))


class Stats(ctypes.Structure):
    """``sparkcache_stats``."""

    _fields_ = (
        ("bytes_restored", c_uint64),
        ("bytes_captured", c_uint64),
        ("pages_restored", c_uint64),
        ("pages_captured", c_uint64),
        ("launches", c_uint64),
        ("transactions_finished", c_uint64),
        ("transactions_aborted", c_uint64),
        ("transactions_open", c_uint64),
    )


class AbiInfo(ctypes.Structure):
    """``sparkcache_abi_info``."""

    _fields_ = (
        ("abi_version", c_uint32),
        ("capabilities", c_uint32),
        ("config_bytes", c_uint32),
        ("layer_bytes", c_uint32),
        ("extent_bytes", c_uint32),
        ("page_bytes", c_uint32),
        ("sealed_page_bytes", c_uint32),
        ("span_bytes", c_uint32),
        ("verified_page_bytes", c_uint32),
        ("arena_bytes", c_uint32),
        ("stats_bytes", c_uint32),
        ("reserved", c_uint32),
    )


_SIZES = {
    "config_bytes": ctypes.sizeof(Config),
    "layer_bytes": LAYER.size,
    "extent_bytes": EXTENT.size,
    "page_bytes": PAGE.size,
    "sealed_page_bytes": SEALED_PAGE.size,
    "span_bytes": SPAN.size,
    "verified_page_bytes": VERIFIED_PAGE.size,
    "arena_bytes": ctypes.sizeof(ArenaView),
    "stats_bytes": ctypes.sizeof(Stats),
}

_OUT = POINTER(c_void_p)

_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "create": (POINTER(Config), _OUT),
    "destroy": (c_void_p,),
    "describe": (c_void_p, c_char_p, c_uint64, c_char_p, c_uint64),
    "get_stats": (c_void_p, POINTER(Stats)),
    "fence_record": (c_void_p, c_uint64, _OUT),
    "fence_destroy": (c_void_p,),
}
for _kind in ("restore", "placing", "capture"):
    _FUNCTIONS[f"{_kind}_begin"] = (c_void_p, c_char_p, c_uint64, c_void_p, _OUT)
    _FUNCTIONS[f"{_kind}_order"] = (c_void_p, c_uint64)
    _FUNCTIONS[f"{_kind}_finish"] = (c_void_p, c_uint64)
    _FUNCTIONS[f"{_kind}_abort"] = (c_void_p, c_uint64)
    _FUNCTIONS[f"{_kind}_destroy"] = (c_void_p,)
for _kind in ("restore", "capture"):
    _FUNCTIONS[f"{_kind}_acquire"] = (c_void_p, c_uint64, POINTER(ArenaView))
    _FUNCTIONS[f"{_kind}_release"] = (c_void_p, c_uint64)
    _FUNCTIONS[f"{_kind}_submit"] = (c_void_p, c_uint64, c_char_p, c_uint64)
_FUNCTIONS["placing_submit"] = (c_void_p, c_void_p, c_uint64, c_char_p, c_uint64, c_uint64)
_FUNCTIONS["capture_wait"] = (c_void_p, c_uint64, c_uint64)

_loaded: dict[str, ctypes.CDLL] = {}
_loading = threading.Lock()


def read_checked(path: Path, sha256: str) -> tuple[int, bytes]:
    """Steps (1) and (2): return an open descriptor of ``path`` and its authenticated bytes.

    Raises:
        FileNotFoundError: there is no such file.
        PlacementUnavailableError: it is not a regular file, or holds other bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PlacementUnavailableError(
            f"{path}: {error.strerror}; name a readable regular file, no symbolic link"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # (1)
            raise PlacementUnavailableError(f"{path}: not a regular file; name the library itself")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        found = hashlib.sha256(data).hexdigest()
        if found != sha256.lower():  # (2)
            raise PlacementUnavailableError(
                f"{path}: SHA-256 is {found}, expected {sha256}; reinstall the connector, or "
                "name the library that was meant (spark_cache_cuda_placement_library)"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, data


def load_library(path: Path, sha256: str) -> ctypes.CDLL:
    """Load the library that has this digest; checked every time, loaded once per process.

    Raises:
        FileNotFoundError: there is no such file.
        PlacementUnavailableError: any other reason not to use it.
    """
    with _loading:
        descriptor, _ = read_checked(path, sha256)
        key = sha256.lower()
        if key in _loaded:
            os.close(descriptor)
            return _loaded[key]
        try:
            # The descriptor stays open for good: the loader knows the library by this name, and
            # would answer with it for another file under the same number.
            library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")  # (3)
        except OSError as error:
            os.close(descriptor)
            raise PlacementUnavailableError(
                f"{path}: {error}; take the wheel of this machine's architecture"
            ) from error
        _check_abi(path, library)  # (4)
        _loaded[key] = library
        return library


def _check_abi(path: Path, library: ctypes.CDLL) -> None:
    info = AbiInfo()
    try:
        query = library.sparkcache_query
        query.argtypes, query.restype = (c_uint32, POINTER(AbiInfo)), c_int32
        status = query(ABI_VERSION, ctypes.byref(info))
    except AttributeError as error:
        raise PlacementUnavailableError(
            f"{path}: not a SparkCache placement library: {error}"
        ) from error
    if status != OK or info.abi_version != ABI_VERSION:
        raise PlacementUnavailableError(
            f"{path}: speaks ABI {info.abi_version}, this connector {ABI_VERSION}; install "
            "library and connector of one release"
        )
    for field, size in _SIZES.items():
        if getattr(info, field) != size:
            raise PlacementUnavailableError(
                f"{path}: {field} is {getattr(info, field)}, expected {size}; install library "
                "and connector of one release"
            )
    try:
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, f"sparkcache_{name}")
            function.argtypes, function.restype = arguments, c_int32
        library.sparkcache_last_error.argtypes = (c_char_p, c_uint64)
        library.sparkcache_last_error.restype = c_uint64
    except AttributeError as error:
        raise PlacementUnavailableError(f"{path}: incomplete: {error}; reinstall it") from error
