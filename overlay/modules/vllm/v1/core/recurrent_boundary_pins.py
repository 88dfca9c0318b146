# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the SparkCache authors
"""References that keep handed-over boundary blocks from being recycled.

A pin is one reference on one block for one hand-off. Its serial number is never
given out again, so that a late release can only ever be a no-op. A pin ends with
its request (finish, abort, preemption), or earlier when the connector reports
that it has captured the block.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.core.recurrent_boundary_choice import opts_in

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput


class BoundaryPins:
    """Takes pins and forgets them; returning the blocks to the pool is the caller's.

    Both ways to end pins return their blocks and leave the references in place,
    because whether a block may be recycled now or only after a step that is
    still in flight is the scheduler's to know.
    """

    def __init__(self, block_pool: "BlockPool") -> None:
        self._block_pool = block_pool
        self._next_serial = itertools.count(1)
        self._request_of: dict[int, str] = {}
        self._pins: dict[str, dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._request_of)

    def take(self, request_id: str, block: "KVCacheBlock") -> int:
        """Reference the block once more and return the serial of that pin."""
        self._block_pool.touch((block,))
        serial = next(self._next_serial)
        self._request_of[serial] = request_id
        self._pins.setdefault(request_id, {})[serial] = block
        return serial

    def end(self, serials: Iterable[Any]) -> list["KVCacheBlock"]:
        """End the pins with these serials; unknown and spent ones count for nothing."""
        blocks: list[KVCacheBlock] = []
        for serial in serials:
            if type(serial) is not int:
                continue
            request_id = self._request_of.pop(serial, None)
            if request_id is None:
                continue
            pins = self._pins[request_id]
            blocks.append(pins.pop(serial))
            if not pins:
                del self._pins[request_id]
        return blocks

    def end_all_of(self, request_id: str) -> list["KVCacheBlock"]:
        pins = self._pins.pop(request_id, {})
        for serial in pins:
            del self._request_of[serial]
        return list(pins.values())


class CaptureVotes:
    """Lets a pin fall only when every connector that was offered it released it.

    For MultiConnector: its children see the same hand-off and capture at their
    own pace. A vote lives no longer than the pin that it is about, which the
    scheduler's output tells: a request that finished or was preempted has none.
    """

    def __init__(self) -> None:
        self._newest_serial = 0
        self._open: dict[int, set[int]] = {}
        self._serials_of: dict[str, list[int]] = {}

    def open(self, scheduler_output: "SchedulerOutput") -> None:
        """Begin the votes on the pins of a step, and drop those that died."""
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for request_id in gone & self._serials_of.keys():
            for serial in self._serials_of.pop(request_id):
                self._open.pop(serial, None)
        pins = scheduler_output.recurrent_boundary_pins or {}
        for request_id, serials in pins.items():
            self._serials_of.setdefault(request_id, []).extend(serials)
            for serial in serials:
                self._open[serial] = set()
            self._newest_serial = max(self._newest_serial, *serials)

    def count(self, connectors: Iterable[Any]) -> Iterator[int]:
        """Collect what the opted-in connectors released; yield what all of them did."""
        voters = {i: c for i, c in enumerate(connectors) if opts_in(c)}
        for i, connector in voters.items():
            for serial in connector.take_captured_recurrent_boundaries() or ():
                if type(serial) is not int:
                    continue
                if serial <= self._newest_serial and serial not in self._open:
                    continue  # spent
                votes = self._open.setdefault(serial, set())
                votes.add(i)
                if len(votes) == len(voters):
                    del self._open[serial]
                    yield serial
