"""As much of the CUDA driver as the GPU checks need, without torch."""

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from sparkcache_connector.worker.placement_layout import MemoryRegion


class NoDeviceError(Exception):
    """There is no CUDA device here, and why."""


class Device:
    """Device 0, its primary context current in the calling thread."""

    def __init__(self):
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoDeviceError(f"no CUDA driver ({error})") from None
        status = self._cuda.cuInit(0)
        if status != 0:
            raise NoDeviceError(f"cuInit answers {status}")
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise NoDeviceError("the driver sees no device")
        self._device = c_int()
        self.call("cuDeviceGet", byref(self._device), 0)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self._device)
        self.name = name.value.decode()
        self.capability = f"{self.attribute(75)}.{self.attribute(76)}"
        self.multiprocessors = self.attribute(16)
        self.integrated = bool(self.attribute(18))
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self.make_current()

    def call(self, name, *arguments):
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = c_char_p()
            self._cuda.cuGetErrorName(status, byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def attribute(self, which):
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), which, self._device)
        return value.value

    def make_current(self):
        self.call("cuCtxSetCurrent", self._context)

    def allocate(self, nbytes):
        pointer = c_uint64()
        self.call("cuMemAlloc_v2", byref(pointer), c_size_t(nbytes))
        return pointer.value

    def free(self, pointer):
        self.call("cuMemFree_v2", c_uint64(pointer))

    def pinned(self, nbytes):
        pointer = c_void_p()
        self.call("cuMemHostAlloc", byref(pointer), c_size_t(nbytes), c_uint(1))
        return pointer.value

    def free_pinned(self, pointer):
        self.call("cuMemFreeHost", c_void_p(pointer))

    def write(self, pointer, data):
        self.call("cuMemcpyHtoD_v2", c_uint64(pointer), bytes(data), c_size_t(len(data)))

    def read(self, pointer, nbytes):
        data = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", data, c_uint64(pointer), c_size_t(nbytes))
        return data.raw

    def stream(self):
        handle = c_void_p()
        self.call("cuStreamCreateWithPriority", byref(handle), c_uint(1), c_int(0))
        return handle

    def event(self):
        handle = c_void_p()
        self.call("cuEventCreate", byref(handle), c_uint(0))
        return handle

    def seconds(self, stream, work):
        """Device seconds of what ``work`` queues on ``stream``."""
        start, stop = self.event(), self.event()
        self.call("cuEventRecord", start, stream)
        work()
        self.call("cuEventRecord", stop, stream)
        self.call("cuEventSynchronize", stop)
        elapsed = c_float()
        self.call("cuEventElapsedTime", byref(elapsed), start, stop)
        for event in (start, stop):
            self.call("cuEventDestroy_v2", event)
        return max(elapsed.value / 1e3, 1e-9)

    def functions(self, fatbin, *names):
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), fatbin)
        found = []
        for name in names:
            function = c_void_p()
            self.call("cuModuleGetFunction", byref(function), module, name.encode())
            found.append(function)
        return found

    def launch(self, function, blocks, threads, stream, *arguments):
        holders = [c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * len(holders))(
            *[ctypes.cast(byref(holder), c_void_p) for holder in holders]
        )
        sizes = [c_uint(n) for n in (blocks, 1, 1, threads, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *sizes, stream, pointers, None)


class CudaRig:
    """Memory of a device, for the behaviour suite."""

    device = None

    def __init__(self, sizes):
        self._device = self.device
        self._device.make_current()
        self.pointers = [self._device.allocate(size) for size in sizes]
        self.regions = [
            MemoryRegion(pointer, size, "cuda:0", self)
            for pointer, size in zip(self.pointers, sizes, strict=True)
        ]

    def __del__(self):
        for pointer in self.pointers:
            self._device.free(pointer)

    def read(self):
        return [self._device.read(r.address, r.nbytes) for r in self.regions]

    def write(self, contents):
        for region, content in zip(self.regions, contents, strict=True):
            self._device.write(region.address, content)
