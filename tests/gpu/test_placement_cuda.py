"""The behaviour suite on a real CUDA device, staged and mapped."""

import platform

import pytest

from builder.native import FATBIN, LIBRARY, build_native
from sparkcache_connector.worker.placement_abi import load_library
from sparkcache_connector.worker.placement_native import NativePlacement
from tests.gpu.driver import CudaRig, Device, NoDeviceError
from tests.unit.native.placement_suite import PlacementSuite

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    try:
        return Device()
    except NoDeviceError as error:
        pytest.skip(f"no CUDA device: {error}")


@pytest.fixture(scope="module")
def native(device, tmp_path_factory):
    """The library and its kernels, as they ship."""
    from hashlib import sha256

    files = {
        path.name: path
        for path in build_native(platform.machine(), tmp_path_factory.mktemp("native"))
    }
    assert FATBIN in files, "kernels need nvcc in PATH"
    path = files[LIBRARY]
    library = load_library(path, sha256(path.read_bytes()).hexdigest())
    return library, files[FATBIN].read_bytes()


class _Cuda(PlacementSuite):
    rig = CudaRig
    transfer = 0

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _native(cls, device, native):
        CudaRig.device = device
        library, fatbin = native
        cls.open = staticmethod(
            lambda layout, options: NativePlacement(library, layout, options, fatbin, cls.transfer)
        )


class TestCudaMapped(_Cuda):
    transfer = 1


class TestCudaStaged(_Cuda):
    transfer = 2
