"""A tar archive as tarfile reads it: only forward, and never more than is bounded.

tarfile reads extended headers whole, as large as they say they are: no single read is larger
than a header may be, and no archive expands without end.
"""

from __future__ import annotations

import io
import tarfile
from abc import abstractmethod

from verify.digest import CHUNK


class Forward(io.RawIOBase):
    """A stream that only goes forward.

    Args:
        header_limit: bytes that one read may ask for.
        total_limit: bytes that all reads together may yield.
    """

    def __init__(self, header_limit: int, total_limit: int) -> None:
        self._header_limit = header_limit
        self._total_limit = total_limit
        self._at = 0

    @abstractmethod
    def _take(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end."""

    def readable(self) -> bool:
        """It can be read."""
        return True

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read on to ``offset``; raises ``tarfile.ReadError`` for one that lies behind."""
        if whence != io.SEEK_SET or offset < self._at:
            raise tarfile.ReadError("entries out of order")
        while self._at < offset and self.read(min(CHUNK, offset - self._at)):
            pass
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes; raises ``tarfile.ReadError`` past a limit."""
        if not 0 <= size <= self._header_limit:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self._take(size)
        self._at += len(data)
        if self._at > self._total_limit:
            raise tarfile.ReadError(f"expands to more than {self._total_limit} bytes")
        return data
