"""Runs in the engine environment, where the patched vLLM is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_configure(config: pytest.Config) -> None:
    # What vLLM and the packages below it warn about on import is not ours to fix.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::UserWarning")
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.engine)


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
