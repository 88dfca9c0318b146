"""The suite against the native library: on the host, and on CUDA with a driver that is a fake."""

import ctypes
import struct

import pytest

from sparkcache_connector.worker.placement_abi import load_library
from sparkcache_connector.worker.placement_layout import MemoryRegion
from sparkcache_connector.worker.placement_native import NativePlacement
from tests.unit.native import native_build
from tests.unit.native.placement_suite import BufferRig, PlacementSuite

FAKE_FATBIN = struct.pack("=IHHQ", 0xBA55ED50, 1, 16, 0)
MAPPED, STAGED = 1, 2


@pytest.fixture(scope="module")
def library():
    path = native_build.library()
    return load_library(path, native_build.sha256(path))


@pytest.fixture(scope="module")
def driver():
    """Loaded first, it is what the library finds under the driver's name."""
    return ctypes.CDLL(str(native_build.fake_cuda()))


class TestNativeHost(PlacementSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _library(cls, library):
        cls.open = staticmethod(lambda layout, options: NativePlacement(library, layout, options))


class _FakeCudaRig(BufferRig):
    """Host memory that the fake driver takes for the device's."""

    driver = None

    def __init__(self, sizes):
        super().__init__(sizes)
        for region in self.regions:
            self.driver.fake_cuda_adopt(
                ctypes.c_void_p(region.address), ctypes.c_uint64(region.nbytes), 0
            )
        self.regions = [MemoryRegion(r.address, r.nbytes, "cuda:0", r.owner) for r in self.regions]


class _FakeCuda(PlacementSuite):
    rig = _FakeCudaRig
    transfer = STAGED

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _library(cls, library, driver):
        _FakeCudaRig.driver = driver
        driver.fake_cuda_live.restype = ctypes.c_uint64
        driver.fake_cuda_reset()
        cls.open = staticmethod(
            lambda layout, options: NativePlacement(
                library, layout, options, FAKE_FATBIN, cls.transfer
            )
        )
        yield
        assert driver.fake_cuda_live() == 0


class TestCudaStagedOverAFakeDriver(_FakeCuda):
    transfer = STAGED


class TestCudaMappedOverAFakeDriver(_FakeCuda):
    transfer = MAPPED
