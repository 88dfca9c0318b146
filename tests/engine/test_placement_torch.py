"""The suite against the torch fallback on the host."""

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment (torch)")

from sparkcache_connector.worker.placement import region_of_tensor  # noqa: E402
from sparkcache_connector.worker.placement_torch import TorchPlacement  # noqa: E402
from tests.unit.native.placement_suite import BufferRig, PlacementSuite  # noqa: E402

pytestmark = pytest.mark.engine


class TensorRig(BufferRig):
    """Host memory in tensors."""

    def __init__(self, sizes):
        self.tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.regions = [region_of_tensor(tensor) for tensor in self.tensors]

    def read(self):
        return [bytes(tensor.tolist()) for tensor in self.tensors]

    def write(self, contents):
        for tensor, content in zip(self.tensors, contents, strict=True):
            tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


class TestTorchOverTensors(PlacementSuite):
    rig = staticmethod(TensorRig)
    open = staticmethod(TorchPlacement)


class TestTorchOverBuffers(PlacementSuite):
    open = staticmethod(TorchPlacement)
