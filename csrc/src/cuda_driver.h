// SPDX-License-Identifier: Apache-2.0
//
// The driver API, reached by dlopen: this library is the same file where there is no CUDA. The
// types and constants are declared here because a build without the toolkit has no cuda.h;
// tests/cuda_header_check.cpp compares them with NVIDIA's where that exists.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparkcache::cuda {

using Result = int;
using Device = int;
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using DevicePointer = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNoDevice = 100;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidImage = 200;
constexpr Result kNoBinaryForGpu = 209;
constexpr Result kNotReady = 600;

constexpr int kMultiprocessorCount = 16;
constexpr int kIntegrated = 18;
constexpr int kCanMapHostMemory = 19;

constexpr int kPointerMemoryType = 2;
constexpr int kPointerDeviceOrdinal = 9;
constexpr unsigned kMemoryTypeDevice = 2;

constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;

/// Every entry point: name in the table, exported symbol, parameters. All return a CUresult.
#define SPARKCACHE_CUDA_FUNCTIONS(X)                                                             \
    X(init, "cuInit", (unsigned))                                                                \
    X(get_error_name, "cuGetErrorName", (Result, const char**))                                  \
    X(device_get, "cuDeviceGet", (Device*, int))                                                 \
    X(device_get_attribute, "cuDeviceGetAttribute", (int*, int, Device))                         \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (Context*, Device))                            \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", (Device))                                 \
    X(context_push, "cuCtxPushCurrent_v2", (Context))                                            \
    X(context_pop, "cuCtxPopCurrent_v2", (Context*))                                             \
    X(priority_range, "cuCtxGetStreamPriorityRange", (int*, int*))                               \
    X(module_load, "cuModuleLoadData", (Module*, const void*))                                   \
    X(module_unload, "cuModuleUnload", (Module))                                                 \
    X(module_get_function, "cuModuleGetFunction", (Function*, Module, const char*))              \
    X(host_alloc, "cuMemHostAlloc", (void**, std::size_t, unsigned))                             \
    X(host_free, "cuMemFreeHost", (void*))                                                       \
    X(host_device_pointer, "cuMemHostGetDevicePointer_v2", (DevicePointer*, void*, unsigned))    \
    X(device_alloc, "cuMemAlloc_v2", (DevicePointer*, std::size_t))                              \
    X(device_free, "cuMemFree_v2", (DevicePointer))                                              \
    X(pointer_attribute, "cuPointerGetAttribute", (void*, int, DevicePointer))                   \
    X(stream_create, "cuStreamCreateWithPriority", (Stream*, unsigned, int))                     \
    X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                            \
    X(stream_wait_event, "cuStreamWaitEvent", (Stream, Event, unsigned))                         \
    X(stream_synchronize, "cuStreamSynchronize", (Stream))                                       \
    X(event_create, "cuEventCreate", (Event*, unsigned))                                         \
    X(event_destroy, "cuEventDestroy_v2", (Event))                                               \
    X(event_record, "cuEventRecord", (Event, Stream))                                            \
    X(event_query, "cuEventQuery", (Event))                                                      \
    X(copy_to_device, "cuMemcpyHtoDAsync_v2", (DevicePointer, const void*, std::size_t, Stream)) \
    X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, DevicePointer, std::size_t, Stream))         \
    X(launch, "cuLaunchKernel",                                                                  \
      (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream,   \
       void**, void**))

/// The entry points of the installed driver; one per process, never unloaded.
class Driver {
public:
    /// Throws UNSUPPORTED where there is no driver, or one that lacks an entry point.
    static const Driver& get();

#define SPARKCACHE_CUDA_MEMBER(name, symbol, parameters) Result(*name) parameters = nullptr;
    SPARKCACHE_CUDA_FUNCTIONS(SPARKCACHE_CUDA_MEMBER)
#undef SPARKCACHE_CUDA_MEMBER

    /// `"CUDA_ERROR_…"`; never null.
    [[nodiscard]] const char* name_of(Result result) const noexcept;

private:
    Driver();
};

/// Throw the Error for a failed call: NO_MEMORY, UNSUPPORTED for a missing device or kernel, or
/// DEVICE for everything else.
[[noreturn]] void fail_call(const Driver& driver, Result result, const char* call,
                            const char* file, int line);

/// Evaluate a driver call and throw unless it succeeded, naming the call and the place.
#define SPARKCACHE_CUDA_TRY(driver, call)                                                        \
    do {                                                                                         \
        const ::sparkcache::cuda::Result sparkcache_result = (driver).call;                      \
        if (sparkcache_result != ::sparkcache::cuda::kSuccess) {                                 \
            ::sparkcache::cuda::fail_call((driver), sparkcache_result, #call, __FILE_NAME__,     \
                                          __LINE__);                                             \
        }                                                                                        \
    } while (false)

}  // namespace sparkcache::cuda
