"""A rank without an engine: two groups of torch memory, a real store, the torch placement."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from sparkcache_connector.messages import GroupBlocks, LoadOrder, PublishOrder
from sparkcache_connector.pages import FULL, RECURRENT, GroupShape, select
from sparkcache_connector.store.store import Store
from sparkcache_connector.worker.capture import CaptureWorker
from sparkcache_connector.worker.restore import RestoreWorker

BLOCK = 16
BLOCKS = 64
STATE = 1_000
PADDED = 4_096
ROW = 64
SHAPES = (GroupShape(RECURRENT, BLOCK), GroupShape(FULL, BLOCK))


@dataclass
class Rank:
    """What the tests drive."""

    store: Store
    recurrent: torch.Tensor
    attention: torch.Tensor
    capture: CaptureWorker
    restore: RestoreWorker
    placement: object
    root: object

    def publish_order(self, number, root, boundary, *, state_block, blocks, base=None):
        groups = []
        for index, shape in enumerate(SHAPES):
            pages = select(shape, boundary)
            chosen = (state_block,) if index == 0 else tuple(blocks[: pages.count])
            groups.append(GroupBlocks(index, pages.first, chosen, pages.last_positions))
        return PublishOrder(number, "r", root, boundary, base, tuple(groups))

    def load_order(self, request, root, boundary, *, state_block, blocks, refused=""):
        groups = self.publish_order(0, root, boundary, state_block=state_block, blocks=blocks)
        return LoadOrder(request, root, boundary, 0, groups.groups, refused)

    def published(self, orders, fence=None):
        """Publish and wait; what was said about each."""
        for order in orders:
            self.capture.submit(order, fence)
        return self.wait_reports(len(orders))

    def wait_reports(self, number):
        copied, reports = [], []
        deadline = time.monotonic() + 20
        while len(reports) < number:
            assert time.monotonic() < deadline, "a publication is never reported"
            more, ended = self.capture.take()
            copied += more
            reports += ended
            time.sleep(0.005)
        return copied, reports

    def ended(self, number=1):
        """Wait for so many loads to end."""
        requests, failed, blocks = [], [], set()
        deadline = time.monotonic() + 20
        while len(requests) < number:
            assert time.monotonic() < deadline, "a load never ends"
            ended = self.restore.take()
            requests += sorted(ended.requests)
            failed += ended.failed
            blocks |= ended.invalid_blocks
            time.sleep(0.005)
        return requests, failed, blocks
