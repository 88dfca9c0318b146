"""The caller's side of `stepped_engine`: an engine process that takes commands and tells events."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

from tests.support import engine_env, offline_engine

HERE = Path(__file__).parent
START_SECONDS = 900.0


class EngineProcessError(Exception):
    """The engine's process ended, or did not say what it should; the message shows its log."""


class EngineProcess:
    """One engine, started at once; `ready` says when it answers.

    Args:
        job: see `stepped_engine`.
        log: where the engine's output goes.
        environment: the engine environment it runs in.
        variables: environment variables over those of `offline_engine`.
    """

    def __init__(
        self,
        job: dict[str, Any],
        log: Path,
        environment: str = "patched",
        variables: dict[str, str] | None = None,
    ) -> None:
        self._log = log
        self._rest = b""
        self._events: deque[dict[str, Any]] = deque()
        self._receive, child = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [engine_env.interpreter(environment), "-P", HERE / "stepped_engine.py", str(child)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | offline_engine.ENVIRONMENT | (variables or {}),
                pass_fds=[child],
            )
        os.close(child)
        os.set_blocking(self._receive, False)
        self.send(job)

    @property
    def descriptor(self) -> int:
        """Readable when there are events."""
        return self._receive

    @property
    def identifier(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, command: dict[str, Any]) -> None:
        """Send one line; an engine that has ended shows when its events are taken."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def take(self) -> list[dict[str, Any]]:
        """Events since the last call, without waiting."""
        ended = False
        while True:
            try:
                data = os.read(self._receive, 1 << 20)
            except BlockingIOError:
                break
            if not data:
                ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        found = [*self._events, *(json.loads(line) for line in lines)]
        self._events.clear()
        if ended and not found:
            self._process.wait()
            raise EngineProcessError(
                f"the engine ended with {self._process.returncode}:\n{self._tail()}"
            )
        return found

    def wait_for(self, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The next such event; others stay to be taken."""
        deadline = time.monotonic() + seconds
        seen: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            if not self._events:
                select.select([self._receive], [], [], 1.0)
            for number, found in enumerate(batch := self.take()):
                if found["event"] == event:
                    self._events.extend([*seen, *batch[number + 1 :]])
                    return found
                seen.append(found)
        raise EngineProcessError(f"no event {event!r} within {seconds:.0f} s:\n{self._tail()}")

    def call(self, command: dict[str, Any], event: str, seconds: float = 300.0) -> dict[str, Any]:
        """Send a command and wait for what answers it."""
        self.send(command)
        return self.wait_for(event, seconds)

    def shared_memory(self) -> set[str]:
        """Entries of /dev/shm that the process maps or holds open."""
        process = Path("/proc", str(self._process.pid))
        lines = (process / "maps").read_text().splitlines()
        names = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
        for descriptor in (process / "fd").iterdir():
            try:
                names.add(str(descriptor.readlink()))
            except FileNotFoundError:  # closed meanwhile
                continue
        return {name for name in names if name.startswith("/dev/shm/")}

    def kill(self) -> None:
        """End it on the spot."""
        self._process.send_signal(signal.SIGKILL)
        self._reap()

    def end(self) -> None:
        """Shut it down in order."""
        self.call({"do": "end"}, "ended")
        self._reap()

    def _reap(self) -> None:
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._receive)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.kill()
