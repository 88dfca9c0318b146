// SPDX-License-Identifier: Apache-2.0
//
// The C ABI: checks handles and pointers, catches everything, remembers the message.
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "placement.h"
#include "sparkcache_placement.h"
#include "status.h"

namespace {

using namespace sparkcache;

// Any change of these is another ABI version.
static_assert(sizeof(sparkcache_abi_info) == 48);
static_assert(sizeof(sparkcache_config) == 64);
static_assert(sizeof(sparkcache_layer) == 64);
static_assert(sizeof(sparkcache_extent) == 48);
static_assert(sizeof(sparkcache_page) == 24);
static_assert(sizeof(sparkcache_sealed_page) == 48);
static_assert(sizeof(sparkcache_span) == 32);
static_assert(sizeof(sparkcache_verified_page) == 48);
static_assert(sizeof(sparkcache_arena) == 24);
static_assert(sizeof(sparkcache_stats) == 64);

thread_local char last_error[SPARKCACHE_MESSAGE_BYTES] = "";

sparkcache_status remember(sparkcache_status status, const char* message) noexcept {
    const std::size_t length = ::strnlen(message, sizeof last_error - 1);
    std::memcpy(last_error, message, length);
    last_error[length] = '\0';
    return status;
}

/// Run the body of an entry point; nothing is thrown past here.
template <typename Body>
sparkcache_status guarded(Body body) noexcept {
    try {
        body();
        return SPARKCACHE_OK;
    } catch (const Error& error) {
        return remember(error.status(), error.what());
    } catch (const std::bad_alloc&) {
        return remember(SPARKCACHE_NO_MEMORY, "out of host memory; lower the batch");
    } catch (const std::exception& error) {
        return remember(SPARKCACHE_INTERNAL, error.what());
    } catch (...) {
        return remember(SPARKCACHE_INTERNAL, "an exception of an unknown type");
    }
}

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::placement:
            return "a placement";
        case Kind::fence:
            return "a fence";
        case Kind::restore:
            return "a direct restore";
        case Kind::placing:
            return "a page placement";
        case Kind::capture:
            return "a capture";
        case Kind::freed:
            return "freed";
    }
    return "no handle of this library";
}

/// The object behind an opaque handle, which must be of the kind that the function is for.
template <typename Object>
Object& object(const void* handle, Kind expected) {
    if (handle == nullptr) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "the handle is NULL, expected %s", name_of(expected));
    }
    auto* const tagged = static_cast<Tagged*>(const_cast<void*>(handle));
    if (tagged->kind != expected) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "the handle is %s, expected %s; they are not "
             "interchangeable", name_of(tagged->kind), name_of(expected));
    }
    return static_cast<Object&>(*tagged);
}

template <typename Handle>
constexpr Kind kKindOf = Kind::freed;
template <>
constexpr Kind kKindOf<sparkcache_restore> = Kind::restore;
template <>
constexpr Kind kKindOf<sparkcache_placing> = Kind::placing;
template <>
constexpr Kind kKindOf<sparkcache_capture> = Kind::capture;

template <typename Handle>
Transaction& transaction(Handle* handle) {
    return object<Transaction>(handle, kKindOf<Handle>);
}

Placement& placement_of(const sparkcache_placement* handle) {
    return object<Placement>(handle, Kind::placement);
}

template <typename T>
std::span<T> array(T* items, std::uint64_t count, const char* what) {
    if (items == nullptr && count > 0) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "%llu %s at NULL", static_cast<unsigned long long>(count),
             what);
    }
    if (count > PTRDIFF_MAX / sizeof(T)) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "%llu %s are more than memory",
             static_cast<unsigned long long>(count), what);
    }
    return {items, static_cast<std::size_t>(count)};
}

template <typename T>
T& out(T* pointer, const char* what) {
    if (pointer == nullptr) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "no place for the %s; pass a pointer", what);
    }
    return *pointer;
}

void require_zero(std::uint32_t reserved, std::size_t page) {
    if (reserved != 0) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "page %zu: reserved is %u, must be 0", page, reserved);
    }
}

std::shared_ptr<Fence> fence_of(const sparkcache_fence* handle) {
    return handle == nullptr ? nullptr : object<FenceHandle>(handle, Kind::fence).fence;
}

template <typename Handle>
void begin(sparkcache_placement* placement, const sparkcache_page* pages, std::uint64_t count,
           const sparkcache_fence* after, Handle** handle) {
    Placement& of = placement_of(placement);
    out(handle, "transaction");
    std::vector<Target> targets;
    for (const sparkcache_page& page : array(pages, count, "pages")) {
        require_zero(page.reserved, targets.size());
        targets.push_back(
            resolve(of.layout(), targets.size(), page.group, page.block, page.positions));
        if (kKindOf<Handle> == Kind::placing && page.positions != SPARKCACHE_ALL_POSITIONS) {
            fail(SPARKCACHE_INVALID_ARGUMENT,
                 "page %zu: a page placement writes whole pages; pass SPARKCACHE_ALL_POSITIONS",
                 targets.size() - 1);
        }
    }
    auto made = std::make_unique<Transaction>(kKindOf<Handle>, of, std::move(targets),
                                              std::vector<Digest>(), fence_of(after));
    *handle = reinterpret_cast<Handle*>(made.release());
}

template <typename Handle>
sparkcache_status destroy(Handle* handle) noexcept {
    return guarded([&] {
        if (handle == nullptr) {
            return;
        }
        Transaction& of = transaction(handle);
        if (!of.closed()) {
            fail(SPARKCACHE_INVALID_STATE, "the transaction is open; finish or abort it first");
        }
        delete &of;
    });
}

}  // namespace

extern "C" {

sparkcache_status sparkcache_query(uint32_t abi_version, sparkcache_abi_info* info) {
    return guarded([&] {
        out(info, "answer") = {SPARKCACHE_PLACEMENT_ABI,
                               SPARKCACHE_CAN_HOST | SPARKCACHE_CAN_CUDA,
                               sizeof(sparkcache_config),
                               sizeof(sparkcache_layer),
                               sizeof(sparkcache_extent),
                               sizeof(sparkcache_page),
                               sizeof(sparkcache_sealed_page),
                               sizeof(sparkcache_span),
                               sizeof(sparkcache_verified_page),
                               sizeof(sparkcache_arena),
                               sizeof(sparkcache_stats),
                               0};
        if (abi_version != SPARKCACHE_PLACEMENT_ABI) {
            fail(SPARKCACHE_UNSUPPORTED, "the caller speaks ABI %u, this library %u", abi_version,
                 SPARKCACHE_PLACEMENT_ABI);
        }
    });
}

const char* sparkcache_status_name(sparkcache_status status) {
    switch (status) {
        case SPARKCACHE_OK:
            return "SPARKCACHE_OK";
        case SPARKCACHE_INVALID_ARGUMENT:
            return "SPARKCACHE_INVALID_ARGUMENT";
        case SPARKCACHE_INVALID_STATE:
            return "SPARKCACHE_INVALID_STATE";
        case SPARKCACHE_COVERAGE:
            return "SPARKCACHE_COVERAGE";
        case SPARKCACHE_UNVERIFIED:
            return "SPARKCACHE_UNVERIFIED";
        case SPARKCACHE_NOT_READY:
            return "SPARKCACHE_NOT_READY";
        case SPARKCACHE_NO_MEMORY:
            return "SPARKCACHE_NO_MEMORY";
        case SPARKCACHE_UNSUPPORTED:
            return "SPARKCACHE_UNSUPPORTED";
        case SPARKCACHE_DEVICE:
            return "SPARKCACHE_DEVICE";
        case SPARKCACHE_INTERNAL:
            return "SPARKCACHE_INTERNAL";
        default:
            return "an unknown status";
    }
}

uint64_t sparkcache_last_error(char* buffer, uint64_t capacity) {
    const std::size_t length = std::strlen(last_error);
    if (buffer != nullptr && capacity > 0) {
        const std::size_t copied = length < capacity ? length : capacity - 1;
        std::memcpy(buffer, last_error, copied);
        buffer[copied] = '\0';
    }
    return length;
}

sparkcache_status sparkcache_create(const sparkcache_config* config,
                                    sparkcache_placement** placement) {
    return guarded([&] {
        out(placement, "placement");
        if (config == nullptr) {
            fail(SPARKCACHE_INVALID_ARGUMENT, "the configuration is NULL");
        }
        *placement = reinterpret_cast<sparkcache_placement*>(
            std::make_unique<Placement>(*config).release());
    });
}

sparkcache_status sparkcache_destroy(sparkcache_placement* placement) {
    return guarded([&] {
        if (placement == nullptr) {
            return;
        }
        Placement& of = placement_of(placement);
        if (const std::uint64_t open = of.counters().open; open > 0) {
            fail(SPARKCACHE_INVALID_STATE, "%llu transactions are open; finish or abort them first",
                 static_cast<unsigned long long>(open));
        }
        delete &of;
    });
}

sparkcache_status sparkcache_describe(sparkcache_placement* placement,
                                      const sparkcache_layer* layers, uint64_t layer_count,
                                      const sparkcache_extent* extents, uint64_t extent_count) {
    return guarded([&] {
        placement_of(placement).describe(array(layers, layer_count, "layers"),
                                         array(extents, extent_count, "extents"));
    });
}

sparkcache_status sparkcache_get_stats(const sparkcache_placement* placement,
                                       sparkcache_stats* stats) {
    return guarded([&] { out(stats, "counters") = placement_of(placement).stats(); });
}

sparkcache_status sparkcache_fence_record(sparkcache_placement* placement, uint64_t stream,
                                          sparkcache_fence** fence) {
    return guarded([&] {
        out(fence, "fence");
        *fence = reinterpret_cast<sparkcache_fence*>(
            std::make_unique<FenceHandle>(placement_of(placement).backend().fence(stream))
                .release());
    });
}

sparkcache_status sparkcache_fence_destroy(sparkcache_fence* fence) {
    return guarded([&] {
        if (fence != nullptr) {
            delete &object<FenceHandle>(fence, Kind::fence);
        }
    });
}

sparkcache_status sparkcache_restore_begin(sparkcache_placement* placement,
                                           const sparkcache_sealed_page* pages,
                                           uint64_t page_count, const sparkcache_fence* after,
                                           sparkcache_restore** restore) {
    return guarded([&] {
        Placement& of = placement_of(placement);
        out(restore, "transaction");
        std::vector<Target> targets;
        std::vector<Digest> digests;
        for (const sparkcache_sealed_page& page : array(pages, page_count, "pages")) {
            require_zero(page.reserved, targets.size());
            targets.push_back(resolve(of.layout(), targets.size(), page.group, page.block,
                                      SPARKCACHE_ALL_POSITIONS));
            std::memcpy(digests.emplace_back().data(), page.digest, sizeof page.digest);
        }
        auto made = std::make_unique<Transaction>(Kind::restore, of, std::move(targets),
                                                  std::move(digests), fence_of(after));
        *restore = reinterpret_cast<sparkcache_restore*>(made.release());
    });
}

sparkcache_status sparkcache_restore_acquire(sparkcache_restore* restore, uint64_t timeout_ns,
                                             sparkcache_arena* arena) {
    return guarded([&] { out(arena, "arena") = transaction(restore).acquire(timeout_ns); });
}

sparkcache_status sparkcache_restore_release(sparkcache_restore* restore, uint64_t arena_index) {
    return guarded([&] { transaction(restore).release(arena_index); });
}

sparkcache_status sparkcache_restore_submit(sparkcache_restore* restore, uint64_t arena_index,
                                            const sparkcache_verified_page* pages,
                                            uint64_t page_count) {
    return guarded([&] {
        transaction(restore).submit_verified(arena_index, array(pages, page_count, "pages"));
    });
}

sparkcache_status sparkcache_restore_order(sparkcache_restore* restore, uint64_t stream) {
    return guarded([&] { transaction(restore).order(stream); });
}

sparkcache_status sparkcache_restore_finish(sparkcache_restore* restore, uint64_t timeout_ns) {
    return guarded([&] { transaction(restore).finish(timeout_ns); });
}

sparkcache_status sparkcache_restore_abort(sparkcache_restore* restore, uint64_t timeout_ns) {
    return guarded([&] { transaction(restore).abort(timeout_ns); });
}

sparkcache_status sparkcache_restore_destroy(sparkcache_restore* restore) {
    return destroy(restore);
}

sparkcache_status sparkcache_placing_begin(sparkcache_placement* placement,
                                           const sparkcache_page* pages, uint64_t page_count,
                                           const sparkcache_fence* after,
                                           sparkcache_placing** placing) {
    return guarded([&] { begin(placement, pages, page_count, after, placing); });
}

sparkcache_status sparkcache_placing_submit(sparkcache_placing* placing, const void* source,
                                            uint64_t source_bytes, const sparkcache_span* spans,
                                            uint64_t span_count, uint64_t timeout_ns) {
    return guarded([&] {
        transaction(placing).submit_memory(
            array(static_cast<const std::byte*>(source), source_bytes, "bytes"),
            array(spans, span_count, "spans"), timeout_ns);
    });
}

sparkcache_status sparkcache_placing_order(sparkcache_placing* placing, uint64_t stream) {
    return guarded([&] { transaction(placing).order(stream); });
}

sparkcache_status sparkcache_placing_finish(sparkcache_placing* placing, uint64_t timeout_ns) {
    return guarded([&] { transaction(placing).finish(timeout_ns); });
}

sparkcache_status sparkcache_placing_abort(sparkcache_placing* placing, uint64_t timeout_ns) {
    return guarded([&] { transaction(placing).abort(timeout_ns); });
}

sparkcache_status sparkcache_placing_destroy(sparkcache_placing* placing) {
    return destroy(placing);
}

sparkcache_status sparkcache_capture_begin(sparkcache_placement* placement,
                                           const sparkcache_page* pages, uint64_t page_count,
                                           const sparkcache_fence* after,
                                           sparkcache_capture** capture) {
    return guarded([&] { begin(placement, pages, page_count, after, capture); });
}

sparkcache_status sparkcache_capture_acquire(sparkcache_capture* capture, uint64_t timeout_ns,
                                             sparkcache_arena* arena) {
    return guarded([&] { out(arena, "arena") = transaction(capture).acquire(timeout_ns); });
}

sparkcache_status sparkcache_capture_release(sparkcache_capture* capture, uint64_t arena_index) {
    return guarded([&] { transaction(capture).release(arena_index); });
}

sparkcache_status sparkcache_capture_submit(sparkcache_capture* capture, uint64_t arena_index,
                                            const sparkcache_span* spans, uint64_t span_count) {
    return guarded([&] {
        transaction(capture).submit_gather(arena_index, array(spans, span_count, "spans"));
    });
}

sparkcache_status sparkcache_capture_wait(sparkcache_capture* capture, uint64_t arena_index,
                                          uint64_t timeout_ns) {
    return guarded([&] { transaction(capture).wait_gathered(arena_index, timeout_ns); });
}

sparkcache_status sparkcache_capture_order(sparkcache_capture* capture, uint64_t stream) {
    return guarded([&] { transaction(capture).order(stream); });
}

sparkcache_status sparkcache_capture_finish(sparkcache_capture* capture, uint64_t timeout_ns) {
    return guarded([&] { transaction(capture).finish(timeout_ns); });
}

sparkcache_status sparkcache_capture_abort(sparkcache_capture* capture, uint64_t timeout_ns) {
    return guarded([&] { transaction(capture).abort(timeout_ns); });
}

sparkcache_status sparkcache_capture_destroy(sparkcache_capture* capture) {
    return destroy(capture);
}

}  // extern "C"
