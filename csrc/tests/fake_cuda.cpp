// SPDX-License-Identifier: Apache-2.0
//
// A driver without a device, built as libcuda.so.1. Streams are queues in order; events and waits
// between streams work as in CUDA; kernels are the real kernel bodies, run lane by lane. Any call
// can be made to fail, once or for good, and everything that exists is counted.
#include "fake_cuda.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "../kernels/tiles.h"
#include "../src/cuda_driver.h"

using namespace sparkcache::cuda;
using sparkcache::Tile;

namespace {

constexpr Result kInvalidValue = 1;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr int kDevices = 2;

struct FakeEvent {
    std::chrono::steady_clock::time_point when;
    std::uint64_t recorded = 0;
    std::uint64_t completed = 0;
};

/// One queued operation: true once it has run.
using Operation = std::function<bool()>;

struct FakeStream {
    std::deque<Operation> queue;
    bool stalled = false;
};

struct Adopted {
    std::uint64_t bytes;
    int ordinal;
};

struct State {
    std::mutex mutex;
    std::uint64_t calls = 0;
    std::uint64_t fail_at = 0;
    Result fail_code = 0;
    bool fail_sticky = false;
    Result dead = 0;
    std::string failed_call;
    std::uint64_t lazy = 0;
    std::uint64_t looks = 0;
    int damage = 0;
    bool integrated = false;
    int retained = 0;
    std::set<void*> modules;
    std::map<void*, std::unique_ptr<FakeStream>> streams;
    // A stream that is destroyed with work in its queue runs it all the same, as in CUDA.
    std::vector<std::unique_ptr<FakeStream>> orphans;
    std::map<void*, std::shared_ptr<FakeEvent>> events;
    std::map<void*, std::size_t> pinned;
    std::map<std::uint64_t, Adopted> device_memory;
    std::set<std::uint64_t> allocated;
};

State& state() {
    static State instance;
    return instance;
}

thread_local std::vector<Context> contexts;
int device_contexts[kDevices];
int function_scatter;
int function_gather;

void run_all(State& s) {
    if (s.dead != 0) {
        return;
    }
    const auto run = [](FakeStream& stream) {
        bool progress = false;
        while (!stream.stalled && !stream.queue.empty() && stream.queue.front()()) {
            stream.queue.pop_front();
            progress = true;
        }
        return progress;
    };
    for (bool progress = true; progress;) {
        progress = false;
        for (auto& [handle, stream] : s.streams) {
            progress |= run(*stream);
        }
        for (auto& stream : s.orphans) {
            progress |= run(*stream);
        }
    }
}

/// Count a call and decide whether it fails.
Result enter(State& s, const char* name, bool needs_context) {
    ++s.calls;
    if (s.dead != 0) {
        return s.dead;
    }
    if (s.fail_at != 0 && s.calls == s.fail_at) {
        s.failed_call = name;
        if (s.fail_sticky) {
            s.dead = s.fail_code;
        }
        return s.fail_code;
    }
    if (needs_context && contexts.empty()) {
        return kInvalidContext;
    }
    return kSuccess;
}

FakeStream* find_stream(State& s, Stream stream) {
    const auto found = s.streams.find(stream);
    if (found != s.streams.end()) {
        return found->second.get();
    }
    if (reinterpret_cast<std::uintptr_t>(stream) <= 2) {  // the default streams
        return s.streams.emplace(stream, std::make_unique<FakeStream>()).first->second.get();
    }
    return nullptr;
}

Result enqueue(State& s, Stream stream, Operation operation) {
    FakeStream* const to = find_stream(s, stream);
    if (to == nullptr) {
        return kInvalidHandle;
    }
    to->queue.push_back(std::move(operation));
    if (s.lazy == 0) {
        run_all(s);
    }
    return kSuccess;
}

/// Note memory of a device; whatever was noted there before is gone.
void note_memory(State& s, std::uint64_t address, std::uint64_t bytes, int ordinal) {
    std::erase_if(s.device_memory, [&](const auto& m) {
        return m.first < address + bytes && address < m.first + m.second.bytes;
    });
    s.device_memory[address] = {bytes, ordinal};
}

void* make_handle() {
    return ::operator new(8);
}

void free_handle(void* handle) {
    ::operator delete(handle);
}

template <bool kGather>
bool run_kernel(const Tile* tiles, std::uint64_t count, std::uint8_t* arena, std::uint64_t bytes,
                volatile std::uint32_t* error, unsigned blocks, unsigned lanes) {
    for (unsigned block = 0; block < blocks; ++block) {
        for (unsigned lane = 0; lane < lanes; ++lane) {
            sparkcache::move_tiles<kGather>(tiles, count, arena, bytes, error, block, blocks, lane,
                                            lanes);
        }
    }
    return true;
}

template <typename T>
T* at(DevicePointer address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
#define FAKE_ENTER(name, needs_context)                                   \
    State& s = state();                                                   \
    const std::lock_guard lock(s.mutex);                                  \
    const Result entered = enter(s, name, needs_context);                 \
    if (entered != kSuccess) {                                            \
        return entered;                                                   \
    }                                                                     \
    static_assert(true)
/// Freeing happens also where it is answered with an error: nobody can try again.
#define FAKE_ENTER_FREE(name)            \
    State& s = state();                  \
    const std::lock_guard lock(s.mutex); \
    const Result entered = enter(s, name, true)

FAKE_EXPORT Result cuInit(unsigned) {
    FAKE_ENTER("cuInit", false);
    return kSuccess;
}

FAKE_EXPORT Result cuGetErrorName(Result result, const char** name) {
    switch (result) {
        case kOutOfMemory:
            *name = "CUDA_ERROR_OUT_OF_MEMORY";
            return kSuccess;
        case kNoDevice:
            *name = "CUDA_ERROR_NO_DEVICE";
            return kSuccess;
        case 700:
            *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
            return kSuccess;
        case 719:
            *name = "CUDA_ERROR_LAUNCH_FAILED";
            return kSuccess;
        default:
            *name = nullptr;
            return kInvalidValue;
    }
}

FAKE_EXPORT Result cuDeviceGet(Device* device, int ordinal) {
    FAKE_ENTER("cuDeviceGet", false);
    if (ordinal < 0 || ordinal >= kDevices) {
        return kInvalidDevice;
    }
    *device = ordinal;
    return kSuccess;
}

FAKE_EXPORT Result cuDeviceGetAttribute(int* value, int which, Device) {
    FAKE_ENTER("cuDeviceGetAttribute", false);
    switch (which) {
        case kMultiprocessorCount:
            *value = 3;
            break;
        case kIntegrated:
            *value = s.integrated ? 1 : 0;
            break;
        default:
            *value = 1;
            break;
    }
    return kSuccess;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
    FAKE_ENTER("cuDevicePrimaryCtxRetain", false);
    ++s.retained;
    *context = reinterpret_cast<Context>(&device_contexts[device]);
    return kSuccess;
}

FAKE_EXPORT Result cuDevicePrimaryCtxRelease_v2(Device) {
    FAKE_ENTER_FREE("cuDevicePrimaryCtxRelease");
    --s.retained;
    return entered == kInvalidContext ? kSuccess : entered;
}

FAKE_EXPORT Result cuCtxPushCurrent_v2(Context context) {
    FAKE_ENTER("cuCtxPushCurrent", false);
    contexts.push_back(context);
    return kSuccess;
}

FAKE_EXPORT Result cuCtxPopCurrent_v2(Context* context) {
    if (contexts.empty()) {
        return kInvalidContext;
    }
    *context = contexts.back();
    contexts.pop_back();
    return kSuccess;
}

FAKE_EXPORT Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    FAKE_ENTER("cuCtxGetStreamPriorityRange", true);
    *least = 0;
    *greatest = -5;
    return kSuccess;
}

FAKE_EXPORT Result cuModuleLoadData(Module* module, const void*) {
    FAKE_ENTER("cuModuleLoadData", true);
    void* const handle = make_handle();
    s.modules.insert(handle);
    *module = static_cast<Module>(handle);
    return kSuccess;
}

FAKE_EXPORT Result cuModuleUnload(Module module) {
    FAKE_ENTER_FREE("cuModuleUnload");
    if (s.modules.erase(module) > 0) {
        free_handle(module);
    }
    return entered;
}

FAKE_EXPORT Result cuModuleGetFunction(Function* function, Module, const char* name) {
    FAKE_ENTER("cuModuleGetFunction", true);
    if (std::strcmp(name, "sparkcache_scatter_v1") == 0) {
        *function = reinterpret_cast<Function>(&function_scatter);
    } else if (std::strcmp(name, "sparkcache_gather_v1") == 0) {
        *function = reinterpret_cast<Function>(&function_gather);
    } else {
        return kNotFound;
    }
    return kSuccess;
}

FAKE_EXPORT Result cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
    FAKE_ENTER("cuMemHostAlloc", true);
    void* const made = ::operator new(bytes, std::align_val_t{4096});
    std::memset(made, 0xCD, bytes);
    s.pinned.emplace(made, bytes);
    *memory = made;
    return kSuccess;
}

FAKE_EXPORT Result cuMemFreeHost(void* memory) {
    FAKE_ENTER_FREE("cuMemFreeHost");
    if (s.pinned.erase(memory) > 0) {
        ::operator delete(memory, std::align_val_t{4096});
    }
    return entered;
}

FAKE_EXPORT Result cuMemHostGetDevicePointer_v2(DevicePointer* address, void* memory, unsigned) {
    FAKE_ENTER("cuMemHostGetDevicePointer", true);
    *address = reinterpret_cast<std::uintptr_t>(memory);
    return kSuccess;
}

FAKE_EXPORT Result cuMemAlloc_v2(DevicePointer* memory, std::size_t bytes) {
    FAKE_ENTER("cuMemAlloc", true);
    void* const made = ::operator new(bytes, std::align_val_t{512});
    std::memset(made, 0xDD, bytes);
    *memory = reinterpret_cast<std::uintptr_t>(made);
    s.allocated.insert(*memory);
    note_memory(s, *memory, bytes, 0);
    return kSuccess;
}

FAKE_EXPORT Result cuMemFree_v2(DevicePointer memory) {
    FAKE_ENTER_FREE("cuMemFree");
    if (s.allocated.erase(memory) > 0) {
        s.device_memory.erase(memory);
        ::operator delete(at<void>(memory), std::align_val_t{512});
    }
    return entered;
}

FAKE_EXPORT Result cuPointerGetAttribute(void* value, int which, DevicePointer address) {
    FAKE_ENTER("cuPointerGetAttribute", true);
    auto found = s.device_memory.upper_bound(address);
    if (found == s.device_memory.begin()) {
        return kInvalidValue;
    }
    --found;
    if (address >= found->first + found->second.bytes) {
        return kInvalidValue;
    }
    if (which == kPointerMemoryType) {
        *static_cast<unsigned*>(value) = kMemoryTypeDevice;
    } else {
        *static_cast<int*>(value) = found->second.ordinal;
    }
    return kSuccess;
}

FAKE_EXPORT Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
    FAKE_ENTER("cuStreamCreateWithPriority", true);
    if (flags != kStreamNonBlocking || priority != 0) {
        return kInvalidValue;  // the model's stream must win
    }
    void* const handle = make_handle();
    s.streams.emplace(handle, std::make_unique<FakeStream>());
    *stream = static_cast<Stream>(handle);
    return kSuccess;
}

FAKE_EXPORT Result cuStreamDestroy_v2(Stream stream) {
    FAKE_ENTER_FREE("cuStreamDestroy");
    if (const auto found = s.streams.find(stream); found != s.streams.end()) {
        s.orphans.push_back(std::move(found->second));
        s.streams.erase(found);
        free_handle(stream);
    }
    return entered;
}

FAKE_EXPORT Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
    FAKE_ENTER("cuStreamWaitEvent", true);
    const auto found = s.events.find(event);
    if (found == s.events.end()) {
        return kInvalidHandle;
    }
    const std::shared_ptr<FakeEvent> target = found->second;
    const std::uint64_t version = target->recorded;
    return enqueue(s, stream, [target, version] { return target->completed >= version; });
}

FAKE_EXPORT Result cuStreamSynchronize(Stream stream) {
    FAKE_ENTER("cuStreamSynchronize", true);
    FakeStream* const of = find_stream(s, stream);
    if (of == nullptr) {
        return kInvalidHandle;
    }
    run_all(s);
    return of->queue.empty() ? kSuccess : 702;  // a launch timeout: it would wait for ever
}

FAKE_EXPORT Result cuEventCreate(Event* event, unsigned) {
    FAKE_ENTER("cuEventCreate", true);
    void* const handle = make_handle();
    s.events.emplace(handle, std::make_shared<FakeEvent>());
    *event = static_cast<Event>(handle);
    return kSuccess;
}

FAKE_EXPORT Result cuEventDestroy_v2(Event event) {
    FAKE_ENTER_FREE("cuEventDestroy");
    if (s.events.erase(event) > 0) {
        free_handle(event);
    }
    return entered;
}

FAKE_EXPORT Result cuEventRecord(Event event, Stream stream) {
    FAKE_ENTER("cuEventRecord", true);
    const auto found = s.events.find(event);
    if (found == s.events.end()) {
        return kInvalidHandle;
    }
    const std::shared_ptr<FakeEvent> target = found->second;
    const std::uint64_t version = ++target->recorded;
    return enqueue(s, stream, [target, version] {
        target->completed = version;
        target->when = std::chrono::steady_clock::now();
        return true;
    });
}

FAKE_EXPORT Result cuEventQuery(Event event) {
    FAKE_ENTER("cuEventQuery", true);
    const auto found = s.events.find(event);
    if (found == s.events.end()) {
        return kInvalidHandle;
    }
    if (s.lazy > 0 && ++s.looks < s.lazy) {
        return kNotReady;
    }
    s.looks = 0;
    run_all(s);
    return found->second->completed == found->second->recorded ? kSuccess : kNotReady;
}

FAKE_EXPORT Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes,
                                        Stream stream) {
    FAKE_ENTER("cuMemcpyHtoDAsync", true);
    return enqueue(s, stream, [=] {
        std::memcpy(at<void>(to), from, bytes);
        return true;
    });
}

FAKE_EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes,
                                        Stream stream) {
    FAKE_ENTER("cuMemcpyDtoHAsync", true);
    return enqueue(s, stream, [=] {
        std::memcpy(to, at<const void>(from), bytes);
        return true;
    });
}

FAKE_EXPORT Result cuLaunchKernel(Function function, unsigned blocks, unsigned, unsigned,
                                  unsigned lanes, unsigned, unsigned, unsigned, Stream stream,
                                  void** arguments, void**) {
    FAKE_ENTER("cuLaunchKernel", true);
    const auto word = [arguments](int i) { return *static_cast<std::uint64_t*>(arguments[i]); };
    auto* const tiles = at<Tile>(word(0));
    const std::uint64_t count = word(1);
    auto* const arena = at<std::uint8_t>(word(2));
    const std::uint64_t bytes = word(3);
    auto* const error = at<volatile std::uint32_t>(word(4));
    const bool gather = function == reinterpret_cast<Function>(&function_gather);
    const int damage = s.damage;
    s.damage = 0;
    return enqueue(s, stream, [=] {
        if (damage == 1) {
            tiles->length = sparkcache::kTileBytes + 1;
        } else if (damage == 2) {
            tiles->arena = bytes;
        }
        return gather ? run_kernel<true>(tiles, count, arena, bytes, error, blocks, lanes)
                      : run_kernel<false>(tiles, count, arena, bytes, error, blocks, lanes);
    });
}

// What the GPU checks call besides (tests/gpu/driver.py).

FAKE_EXPORT Result cuDeviceGetCount(int* count) {
    FAKE_ENTER("cuDeviceGetCount", false);
    *count = kDevices;
    return kSuccess;
}

FAKE_EXPORT Result cuDeviceGetName(char* name, int bytes, Device) {
    FAKE_ENTER("cuDeviceGetName", false);
    std::snprintf(name, static_cast<std::size_t>(bytes), "%s", "No Device At All");
    return kSuccess;
}

FAKE_EXPORT Result cuDriverGetVersion(int* version) {
    FAKE_ENTER("cuDriverGetVersion", false);
    *version = 13000;
    return kSuccess;
}

FAKE_EXPORT Result cuCtxSetCurrent(Context context) {
    FAKE_ENTER("cuCtxSetCurrent", false);
    contexts.assign(1, context);
    return kSuccess;
}

FAKE_EXPORT Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, std::size_t bytes) {
    FAKE_ENTER("cuMemcpyHtoD", true);
    std::memcpy(at<void>(to), from, bytes);
    return kSuccess;
}

FAKE_EXPORT Result cuMemcpyDtoH_v2(void* to, DevicePointer from, std::size_t bytes) {
    FAKE_ENTER("cuMemcpyDtoH", true);
    std::memcpy(to, at<const void>(from), bytes);
    return kSuccess;
}

FAKE_EXPORT Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, std::size_t bytes,
                                        Stream stream) {
    FAKE_ENTER("cuMemcpyDtoDAsync", true);
    return enqueue(s, stream, [=] {
        std::memcpy(at<void>(to), at<const void>(from), bytes);
        return true;
    });
}

FAKE_EXPORT Result cuEventSynchronize(Event event) {
    FAKE_ENTER("cuEventSynchronize", true);
    const auto found = s.events.find(event);
    if (found == s.events.end()) {
        return kInvalidHandle;
    }
    run_all(s);
    return found->second->completed == found->second->recorded ? kSuccess : 702;
}

FAKE_EXPORT Result cuEventElapsedTime(float* milliseconds, Event start, Event stop) {
    FAKE_ENTER("cuEventElapsedTime", true);
    const std::chrono::duration<float, std::milli> apart =
        s.events.at(stop)->when - s.events.at(start)->when;
    *milliseconds = apart.count();
    return kSuccess;
}

FAKE_EXPORT void fake_cuda_reset(void) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.calls = s.fail_at = s.lazy = s.looks = 0;
    s.dead = s.fail_code = s.damage = 0;
    s.fail_sticky = s.integrated = false;
    s.failed_call.clear();
    std::erase_if(s.device_memory, [&](const auto& m) { return !s.allocated.contains(m.first); });
    s.orphans.clear();
    for (auto& [handle, stream] : s.streams) {
        stream->queue.clear();
    }
}

FAKE_EXPORT uint64_t fake_cuda_calls(void) {
    const std::lock_guard lock(state().mutex);
    return state().calls;
}

FAKE_EXPORT void fake_cuda_fail(uint64_t nth, int code, int sticky) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.fail_at = nth;
    s.fail_code = code;
    s.fail_sticky = sticky != 0;
}

FAKE_EXPORT const char* fake_cuda_failed_call(void) {
    const std::lock_guard lock(state().mutex);
    return state().failed_call.c_str();
}

FAKE_EXPORT uint64_t fake_cuda_live(void) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    std::uint64_t streams = 0;
    for (const auto& [handle, stream] : s.streams) {
        streams += reinterpret_cast<std::uintptr_t>(handle) > 2 ? 1 : 0;
    }
    return static_cast<std::uint64_t>(s.retained) + s.modules.size() + streams + s.events.size() +
           s.pinned.size() + s.allocated.size();
}

FAKE_EXPORT uint64_t fake_cuda_depth(void) {
    return contexts.size();
}

FAKE_EXPORT void fake_cuda_lazy(uint64_t looks) {
    const std::lock_guard lock(state().mutex);
    state().lazy = looks;
}

FAKE_EXPORT void fake_cuda_damage(int how) {
    const std::lock_guard lock(state().mutex);
    state().damage = how;
}

FAKE_EXPORT void fake_cuda_adopt(const void* address, uint64_t bytes, int ordinal) {
    const std::lock_guard lock(state().mutex);
    note_memory(state(), reinterpret_cast<std::uintptr_t>(address), bytes, ordinal);
}

FAKE_EXPORT void fake_cuda_integrated(int yes) {
    const std::lock_guard lock(state().mutex);
    state().integrated = yes != 0;
}

FAKE_EXPORT void* fake_cuda_stalled_stream(void) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    void* const handle = make_handle();
    s.streams.emplace(handle, std::make_unique<FakeStream>()).first->second->stalled = true;
    return handle;
}

FAKE_EXPORT void fake_cuda_open_stream(void* stream) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.streams.at(stream)->stalled = false;
    run_all(s);
}

FAKE_EXPORT void fake_cuda_free_stream(void* stream) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.streams.erase(stream);
    free_handle(stream);
}

FAKE_EXPORT void fake_cuda_fill(void* stream, void* where, int value, uint64_t bytes) {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    s.streams.at(stream)->queue.push_back([=] {
        std::memset(where, value, bytes);
        return true;
    });
    run_all(s);
}

FAKE_EXPORT void fake_cuda_run(void) {
    const std::lock_guard lock(state().mutex);
    run_all(state());
}
