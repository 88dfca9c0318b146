"""What tests do to a connector inside a running engine: below its authentication, in its threads,
to its disk and its key, and to the engine's weights. Production code knows nothing of it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Ranks in other processes describe their health on disk once a second, or later on a busy machine.
HEALTH_SECONDS = 5.0


class _Switches:
    """Which faults are on; several are turned on and off within one life."""

    disk_full = False
    read_seconds = 0.0
    tamper: list[Any] | None = None
    capture_dies = False
    restore_dies = False


def faulty() -> None:
    """Put a switch for each fault into the store and the workers; all of them off."""
    from sparkcache_connector.store import durable, reader, store
    from sparkcache_connector.worker import rank
    from sparkcache_connector.worker.capture import CaptureWorker

    allocate, read_exactly = durable.Files.allocate, reader._read_exactly
    gather, plan = CaptureWorker._gather, store.Store.plan

    def full_allocate(self: Any, file: int, size: int) -> None:
        if _Switches.disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(self, file, size)

    def slow_read(*arguments: Any) -> None:
        time.sleep(_Switches.read_seconds)
        read_exactly(*arguments)

    def dying_gather(self: Any, *arguments: Any) -> Any:
        if _Switches.capture_dies:
            raise SystemExit("the capture thread is killed")
        return gather(self, *arguments)

    def dying_plan(self: Any, context: bytes) -> Any:
        if _Switches.restore_dies:
            raise SystemExit("the restore thread is killed")
        return plan(self, context)

    durable.Files.allocate = full_allocate
    reader._read_exactly = slow_read
    CaptureWorker._gather = dying_gather
    store.Store.plan = dying_plan
    store.Store.read = _harmful_read(store.Store.read)
    rank.Options = partial(rank.Options, retry_seconds=0.5)


def _harmful_read(read: Callable[..., int]) -> Callable[..., int]:
    """Harm verified bytes on their way to the engine: below the authentication."""

    def harmful(self: Any, plan: Any, destinations: Any, **keywords: Any) -> int:
        size = read(self, plan, destinations, **keywords)
        if _Switches.tamper is None:
            return size
        kind, group, page = _Switches.tamper
        victim = destinations[group][page]
        if victim is None:
            return size
        if kind == "zero":
            victim[:] = bytes(len(victim))
        elif kind == "swap":
            other = destinations[group + 1][page]
            victim[:], other[:] = bytes(other), bytes(victim)
        elif kind == "other_boundary":
            victim[:] = _state_of_another_boundary(self, plan, group)
        return size

    return harmful


def _state_of_another_boundary(store: Any, plan: Any, group: int) -> bytes:
    from sparkcache_connector.store.workers import Stop

    for context in store.inventory() - {plan.manifest.context}:
        with store.plan(context) as other:
            view = memoryview(bytearray(other.manifest.groups[group].page_bytes))
            wanted = [[None] * g.count for g in other.manifest.groups]
            wanted[group][0] = view
            store._core.reader.read(other, wanted, Stop(), None)
            return bytes(view)
    raise AssertionError("only one root is stored")


def overlap() -> None:
    """Let batches overlap on the CPU, where the platform turns asynchronous scheduling off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(checked)


def _switch(llm: Any, name: str, value: Any) -> None:
    assert hasattr(_Switches, name), name
    setattr(_Switches, name, value)


def _remove(llm: Any, path: str) -> None:
    Path(path).unlink()


def _copy(llm: Any, source: str, target: str) -> None:
    shutil.copy(source, target)


def _flip(llm: Any, rank: str) -> None:
    """Flip a bit of every page that a rank has stored."""
    for path in Path(rank, "packs").glob("*.pack"):
        data = bytearray(path.read_bytes())
        for offset in range(4096, len(data), 4096):
            data[offset] ^= 1
        path.write_bytes(data)


def _pause(llm: Any, seconds: float) -> None:
    time.sleep(seconds)


def _call(llm: Any, method: str, arguments: dict[str, Any]) -> None:
    """One of the engine's own calls on every worker, e.g. `reload_weights`."""
    llm.collective_rpc(method, kwargs=arguments)


def _reset(llm: Any) -> None:
    """What the engine does when weights have been put to sleep or updated by a trainer."""
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


HARM: dict[str, Callable[..., None]] = {"faulty": faulty, "overlap": overlap}
ACTS: dict[str, Callable[..., None]] = {
    "switch": _switch,
    "remove": _remove,
    "copy": _copy,
    "flip": _flip,
    "pause": _pause,
    "call": _call,
    "reset": _reset,
}
