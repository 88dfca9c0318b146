"""What the store's handles have in common: they are closed where a ``with`` block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that closes itself, whatever happened inside."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
