"""Fixtures of a rank without an engine; see rank_harness."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment (`make engine`)")

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The model of a scheduler's worker is shared with the tests of the overlay.
sys.path.insert(0, str(Path(__file__).parents[1] / "overlay"))

from rank_harness import BLOCK, BLOCKS, PADDED, ROW, SHAPES, STATE, Rank  # noqa: E402

from sparkcache_connector.store.core import Options  # noqa: E402
from sparkcache_connector.store.store import Store  # noqa: E402
from sparkcache_connector.telemetry.metrics import Counts  # noqa: E402
from sparkcache_connector.worker.capture import CaptureWorker  # noqa: E402
from sparkcache_connector.worker.placement import (  # noqa: E402
    PlacementOptions,
    open_placement,
    region_of_tensor,
)
from sparkcache_connector.worker.placement_layout import (  # noqa: E402
    Extent,
    LayerPages,
    PageLayout,
)
from sparkcache_connector.worker.restore import RestoreWorker  # noqa: E402
from tests.unit.native import native_build  # noqa: E402


@pytest.fixture
def memory():
    generator = torch.Generator().manual_seed(random.Random(5).randrange(1 << 30))

    def noise(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return noise(BLOCKS, PADDED), noise(BLOCKS, 2, BLOCK, ROW)


@pytest.fixture(params=["torch", "native"])
def placement_options(request):
    """What pages move by: torch, or the native library as this checkout builds it."""
    if request.param == "torch":
        return PlacementOptions(mode="off")
    path = native_build.library()
    return PlacementOptions(mode="on", library=path, library_sha256=native_build.sha256(path))


@pytest.fixture
def make_rank(tmp_path, memory, placement_options):
    opened = []

    def make(*, deadline=20.0, threads=2):
        recurrent, attention = memory
        layout = PageLayout(
            (
                LayerPages(
                    "state",
                    0,
                    region_of_tensor(recurrent),
                    0,
                    PADDED,
                    BLOCKS,
                    (Extent(0, 1, STATE),),
                ),
                LayerPages(
                    "attention",
                    1,
                    region_of_tensor(attention),
                    0,
                    2 * BLOCK * ROW,
                    BLOCKS,
                    (Extent(0, BLOCK, ROW, 0, 2, BLOCK * ROW),),
                ),
            )
        )
        placement = open_placement(layout, placement_options)
        store = Store.open(tmp_path / "rank-0", identity=b"i" * 32, options=Options(workers=2))
        counts = Counts()
        rank = Rank(
            store,
            recurrent,
            attention,
            CaptureWorker(store, placement, SHAPES, 0, counts),
            RestoreWorker(
                store, placement, SHAPES, 0, counts, threads=threads, deadline_seconds=deadline
            ),
            placement,
            tmp_path / "rank-0",
        )
        opened.append(rank)
        return rank

    yield make
    for rank in opened:
        rank.restore.close()
        rank.capture.close()
        rank.store.close()
        rank.placement.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkcache-")]


@pytest.fixture
def rank(make_rank):
    return make_rank()


def pytest_configure(config: pytest.Config) -> None:
    # What vLLM and the packages below it warn about on import is not ours to fix.
    for category in ("DeprecationWarning", "UserWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
