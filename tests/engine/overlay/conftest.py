"""What the tests of the overlay share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else ""
        self.messages.append(f"{record.levelname} {record.getMessage()} {error!s}")


@pytest.fixture
def engine_log() -> Iterator[list[str]]:
    """What vLLM logs at WARNING and above, one string a record."""
    handler = _Messages()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)
