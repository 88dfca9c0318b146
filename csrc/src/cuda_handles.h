// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "cuda_driver.h"
#include "sparkcache_placement.h"
#include "sync.h"

namespace sparkcache::cuda {

/// The device's primary context, the one that torch uses, and whether it has failed for good.
class DeviceContext {
public:
    explicit DeviceContext(int ordinal);
    ~DeviceContext();
    DeviceContext(const DeviceContext&) = delete;
    DeviceContext& operator=(const DeviceContext&) = delete;

    [[nodiscard]] const Driver& driver() const noexcept { return driver_; }
    [[nodiscard]] Device device() const noexcept { return device_; }
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
    [[nodiscard]] int attribute(int which) const;

    /// Remember the first failure after which the context runs nothing any more.
    void mark_failed(const char* message) noexcept;
    /// Throw DEVICE if the context has failed.
    void require_alive() const;

    /// Makes the context current for a scope and restores what was.
    class Scope {
    public:
        explicit Scope(const DeviceContext& context);
        ~Scope();
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

    private:
        const Driver& driver_;
    };

private:
    const Driver& driver_;
    int ordinal_;
    Device device_ = 0;
    Context context_ = nullptr;
    mutable Mutex mutex_;
    char failure_[SPARKCACHE_MESSAGE_BYTES] = "";
};

/// Owns one driver object; `Free` is the entry point that frees it. The context must be current
/// where it dies; what a failed context answers then is of no use to anybody.
template <typename T, Result (*Driver::*Free)(T)>
class Handle {
public:
    Handle() = default;
    Handle(const Driver& driver, T value) noexcept : driver_(&driver), value_(value) {}
    ~Handle() { reset(); }
    Handle(Handle&& other) noexcept
        : driver_(other.driver_), value_(std::exchange(other.value_, T{})) {}
    Handle& operator=(Handle&& other) noexcept {
        if (this != &other) {
            reset();
            driver_ = other.driver_;
            value_ = std::exchange(other.value_, T{});
        }
        return *this;
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    [[nodiscard]] T get() const noexcept { return value_; }

private:
    void reset() noexcept {
        if (value_ != T{}) {
            static_cast<void>((driver_->*Free)(value_));
            value_ = T{};
        }
    }

    const Driver* driver_ = nullptr;
    T value_{};
};

using ModuleHandle = Handle<Module, &Driver::module_unload>;
using StreamHandle = Handle<Stream, &Driver::stream_destroy>;
using EventHandle = Handle<Event, &Driver::event_destroy>;
using DeviceMemory = Handle<DevicePointer, &Driver::device_free>;
using PinnedMemory = Handle<void*, &Driver::host_free>;

EventHandle make_event(const Driver& driver);
StreamHandle make_lowest_priority_stream(const Driver& driver);
DeviceMemory allocate_on_device(const Driver& driver, std::size_t bytes);
/// Page-locked, page-aligned, visible to the device.
PinnedMemory allocate_pinned(const Driver& driver, std::size_t bytes);
/// The address by which kernels reach pinned memory.
DevicePointer device_address(const Driver& driver, const PinnedMemory& memory);

}  // namespace sparkcache::cuda
