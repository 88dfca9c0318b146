// SPDX-License-Identifier: Apache-2.0
//
// Compiled, never run: what src/cuda_driver.h declares is what NVIDIA's header says.
#include <cuda.h>

#include <type_traits>

#include "../src/cuda_driver.h"

namespace ours = sparkcache::cuda;

static_assert(ours::kSuccess == CUDA_SUCCESS);
static_assert(ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNoDevice == CUDA_ERROR_NO_DEVICE);
static_assert(ours::kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
static_assert(ours::kInvalidImage == CUDA_ERROR_INVALID_IMAGE);
static_assert(ours::kNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(ours::kIntegrated == CU_DEVICE_ATTRIBUTE_INTEGRATED);
static_assert(ours::kCanMapHostMemory == CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
static_assert(ours::kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(ours::kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(ours::kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(ours::kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(ours::kHostDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(std::is_same_v<ours::Device, CUdevice>);
static_assert(std::is_same_v<ours::DevicePointer, CUdeviceptr>);

// The symbols that the header's own names stand for, and their parameters: enums are passed as
// the ints that we declare.
#define SPARKCACHE_STRING_(x) #x
#define SPARKCACHE_STRING(x) SPARKCACHE_STRING_(x)

constexpr bool same(const char* a, const char* b) {
    for (; *a != '\0' && *a == *b; ++a, ++b) {
    }
    return *a == *b;
}

template <typename T>
using Plain = std::conditional_t<std::is_enum_v<T>, int, T>;

template <typename Ours, typename Theirs>
constexpr bool kPassedAlike =
    sizeof(Plain<Ours>) == sizeof(Plain<Theirs>) &&
    (std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>);

template <typename Ours, typename Theirs>
struct Alike : std::false_type {};
template <typename... Ours, typename... Theirs>
    requires(sizeof...(Ours) == sizeof...(Theirs))
struct Alike<ours::Result(Ours...), CUresult(Theirs...)>
    : std::bool_constant<(kPassedAlike<Ours, Theirs> && ...)> {};

#define SPARKCACHE_SAME(name, function)                                                      \
    static_assert(                                                                           \
        Alike<std::remove_pointer_t<decltype(ours::Driver::name)>, decltype(function)>::value)
SPARKCACHE_SAME(init, cuInit);
SPARKCACHE_SAME(get_error_name, cuGetErrorName);
SPARKCACHE_SAME(device_get, cuDeviceGet);
SPARKCACHE_SAME(device_get_attribute, cuDeviceGetAttribute);
SPARKCACHE_SAME(primary_retain, cuDevicePrimaryCtxRetain);
SPARKCACHE_SAME(primary_release, cuDevicePrimaryCtxRelease);
SPARKCACHE_SAME(context_push, cuCtxPushCurrent);
SPARKCACHE_SAME(context_pop, cuCtxPopCurrent);
SPARKCACHE_SAME(priority_range, cuCtxGetStreamPriorityRange);
SPARKCACHE_SAME(module_load, cuModuleLoadData);
SPARKCACHE_SAME(module_unload, cuModuleUnload);
SPARKCACHE_SAME(module_get_function, cuModuleGetFunction);
SPARKCACHE_SAME(host_alloc, cuMemHostAlloc);
SPARKCACHE_SAME(host_free, cuMemFreeHost);
SPARKCACHE_SAME(host_device_pointer, cuMemHostGetDevicePointer);
SPARKCACHE_SAME(device_alloc, cuMemAlloc);
SPARKCACHE_SAME(device_free, cuMemFree);
SPARKCACHE_SAME(pointer_attribute, cuPointerGetAttribute);
SPARKCACHE_SAME(stream_create, cuStreamCreateWithPriority);
SPARKCACHE_SAME(stream_destroy, cuStreamDestroy);
SPARKCACHE_SAME(stream_wait_event, cuStreamWaitEvent);
SPARKCACHE_SAME(stream_synchronize, cuStreamSynchronize);
SPARKCACHE_SAME(event_create, cuEventCreate);
SPARKCACHE_SAME(event_destroy, cuEventDestroy);
SPARKCACHE_SAME(event_record, cuEventRecord);
SPARKCACHE_SAME(event_query, cuEventQuery);
SPARKCACHE_SAME(copy_to_device, cuMemcpyHtoDAsync);
SPARKCACHE_SAME(copy_to_host, cuMemcpyDtoHAsync);
SPARKCACHE_SAME(launch, cuLaunchKernel);

static_assert(same(SPARKCACHE_STRING(cuMemAlloc), "cuMemAlloc_v2"));
static_assert(same(SPARKCACHE_STRING(cuMemFree), "cuMemFree_v2"));
static_assert(same(SPARKCACHE_STRING(cuMemHostGetDevicePointer), "cuMemHostGetDevicePointer_v2"));
static_assert(same(SPARKCACHE_STRING(cuMemcpyHtoDAsync), "cuMemcpyHtoDAsync_v2"));
static_assert(same(SPARKCACHE_STRING(cuMemcpyDtoHAsync), "cuMemcpyDtoHAsync_v2"));
static_assert(same(SPARKCACHE_STRING(cuCtxPushCurrent), "cuCtxPushCurrent_v2"));
static_assert(same(SPARKCACHE_STRING(cuCtxPopCurrent), "cuCtxPopCurrent_v2"));
static_assert(same(SPARKCACHE_STRING(cuStreamDestroy), "cuStreamDestroy_v2"));
static_assert(same(SPARKCACHE_STRING(cuEventDestroy), "cuEventDestroy_v2"));
static_assert(same(SPARKCACHE_STRING(cuDevicePrimaryCtxRelease), "cuDevicePrimaryCtxRelease_v2"));
