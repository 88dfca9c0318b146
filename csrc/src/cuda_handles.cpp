// SPDX-License-Identifier: Apache-2.0
#include "cuda_handles.h"

#include <cstdio>

#include "status.h"

namespace sparkcache::cuda {

DeviceContext::DeviceContext(int ordinal) : driver_(Driver::get()), ordinal_(ordinal) {
    SPARKCACHE_CUDA_TRY(driver_, device_get(&device_, ordinal));
    SPARKCACHE_CUDA_TRY(driver_, primary_retain(&context_, device_));
}

DeviceContext::~DeviceContext() {
    static_cast<void>(driver_.primary_release(device_));
}

int DeviceContext::attribute(int which) const {
    int value = 0;
    SPARKCACHE_CUDA_TRY(driver_, device_get_attribute(&value, which, device_));
    return value;
}

void DeviceContext::mark_failed(const char* message) noexcept {
    const Lock lock(mutex_);
    if (failure_[0] == '\0') {
        std::snprintf(failure_, sizeof failure_, "%s", message);
    }
}

void DeviceContext::require_alive() const {
    const Lock lock(mutex_);
    if (failure_[0] != '\0') {
        fail(SPARKCACHE_DEVICE, "device %d failed earlier: %s; restart the engine", ordinal_,
             failure_);
    }
}

DeviceContext::Scope::Scope(const DeviceContext& context) : driver_(context.driver_) {
    SPARKCACHE_CUDA_TRY(driver_, context_push(context.context_));
}

DeviceContext::Scope::~Scope() {
    Context previous = nullptr;
    static_cast<void>(driver_.context_pop(&previous));
}

EventHandle make_event(const Driver& driver) {
    Event event = nullptr;
    SPARKCACHE_CUDA_TRY(driver, event_create(&event, kEventDisableTiming));
    return {driver, event};
}

StreamHandle make_lowest_priority_stream(const Driver& driver) {
    int least = 0;
    int greatest = 0;
    SPARKCACHE_CUDA_TRY(driver, priority_range(&least, &greatest));
    Stream stream = nullptr;
    SPARKCACHE_CUDA_TRY(driver, stream_create(&stream, kStreamNonBlocking, least));
    return {driver, stream};
}

DeviceMemory allocate_on_device(const Driver& driver, std::size_t bytes) {
    DevicePointer memory = 0;
    SPARKCACHE_CUDA_TRY(driver, device_alloc(&memory, bytes));
    return {driver, memory};
}

PinnedMemory allocate_pinned(const Driver& driver, std::size_t bytes) {
    void* memory = nullptr;
    SPARKCACHE_CUDA_TRY(driver, host_alloc(&memory, bytes, kHostPortable | kHostDeviceMap));
    return {driver, memory};
}

DevicePointer device_address(const Driver& driver, const PinnedMemory& memory) {
    DevicePointer address = 0;
    SPARKCACHE_CUDA_TRY(driver, host_device_pointer(&address, memory.get(), 0));
    return address;
}

}  // namespace sparkcache::cuda
