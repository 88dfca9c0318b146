"""An engine that the engine benches ask things of; see ``tests/support/stepped_engine.py``."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import engine_env, tiny_models
from tests.support.engine_process import EngineProcess

HYBRID = ("granite", "lfm2")
ENGINE = {"max_model_len": 18_432, "max_num_batched_tokens": 2_048, "max_num_seqs": 16}


@dataclass(frozen=True)
class Reply:
    """One answered request.

    Attributes:
        first: seconds from the question to the first token.
        began: when it was asked, on the engine's clock.
        times: seconds from the question to each token.
        cached: prompt tokens that were not computed.
    """

    first: float
    began: float
    times: tuple[float, ...]
    cached: int

    @property
    def ended(self) -> float:
        """When the last token came, on the engine's clock."""
        return self.began + self.times[-1]


class Session:
    """One engine, with or without the connector; ends with its block."""

    def __init__(
        self, family: str, log: Path, options: dict[str, Any] | None, **engine: Any
    ) -> None:
        arguments = ENGINE | engine
        if family in HYBRID:
            arguments["mamba_cache_mode"] = "align"
        model = engine_env.tiny_model(family, engine_env.interpreter("patched"))
        job: dict[str, Any] = {"model": str(model), "engine": arguments}
        if options is not None:
            job["options"] = options
        self._process = EngineProcess(job, log)
        self._number = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.__exit__()

    def wait(self) -> None:
        """Until it answers; the first request of a process pays for its warm-up."""
        self._process.wait_for("ready")
        self.ask(prompt("warm-up", 600), 4)

    def send(self, tokens: list[int], answer: int) -> str:
        """Ask without waiting; the id of the request."""
        self._number += 1
        name = str(self._number)
        self._process.send({"do": "ask", "id": name, "prompt": tokens, "tokens": answer})
        return name

    def reply(self) -> Reply:
        """The next answer, whichever request it is of."""
        event = self._process.wait_for("answer", 600)
        times = tuple(event["times"])
        return Reply(times[0], event["began"], times, event["cached"])

    def ask(self, tokens: list[int], answer: int = 1) -> Reply:
        """Ask and wait."""
        self.send(tokens, answer)
        return self.reply()

    def call(self, do: str, event: str, **more: Any) -> dict[str, Any]:
        """A command of the stepped engine."""
        return self._process.call({"do": do, **more}, event)

    def pause(self, seconds: float) -> None:
        """Leave the engine to what it does."""
        time.sleep(seconds)

    def settle(self) -> dict[str, Any]:
        """Let publications end; what the process holds and counts."""
        return self.call("settle", "settled")

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.call("forget", "forgotten")


def prompt(name: object, length: int) -> list[int]:
    """Token ids that are the name's own."""
    return random.Random(repr(name)).choices(range(tiny_models.VOCABULARY), k=length)
