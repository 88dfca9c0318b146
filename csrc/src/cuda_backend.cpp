// SPDX-License-Identifier: Apache-2.0
#include "cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "../kernels/tiles.h"
#include "status.h"

namespace sparkcache::cuda {
namespace {

using ull = unsigned long long;

/// Blocks per multiprocessor; kernels/move.cu says why.
constexpr unsigned kBlocksPerMultiprocessor = 6;
/// Descriptors per arena: enough for pieces of this size; smaller ones take several launches.
constexpr std::uint64_t kPlannedPiece = 1024;

/// Errors in a row after which a context counts as failed.
constexpr int kLooksToBelieve = 3;

constexpr const char* kScatterName = "sparkcache_scatter_v1";
constexpr const char* kGatherName = "sparkcache_gather_v1";

/// The head of a fat binary. The driver is not told how long the image is, so a truncated one
/// must be found out here.
struct FatbinHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t header_bytes;
    std::uint64_t payload_bytes;
};
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;

void check_fatbin(const void* image, std::uint64_t bytes) {
    FatbinHeader header{};
    if (image == nullptr || bytes < sizeof header) {
        fail(SPARKCACHE_INVALID_ARGUMENT,
             "fatbin of %llu bytes; pass the bytes of kernels.fatbin", ull{bytes});
    }
    std::memcpy(&header, image, sizeof header);
    if (header.magic != kFatbinMagic) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "fatbin begins with %08x, expected %08x", header.magic,
             kFatbinMagic);
    }
    if (header.header_bytes > bytes || header.payload_bytes > bytes - header.header_bytes) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "fatbin is cut: %llu bytes of %u + %llu", ull{bytes},
             unsigned{header.header_bytes}, ull{header.payload_bytes});
    }
}

class CudaFence final : public Fence {
public:
    CudaFence(std::shared_ptr<DeviceContext> context, Stream stream)
        : context_(std::move(context)) {
        const DeviceContext::Scope scope(*context_);
        EventHandle event = make_event(context_->driver());
        SPARKCACHE_CUDA_TRY(context_->driver(), event_record(event.get(), stream));
        event_ = std::move(event);
    }
    ~CudaFence() override {
        try {
            const DeviceContext::Scope scope(*context_);
            event_ = EventHandle();
        } catch (const Error&) {
            // A context that cannot be made current has no event to free.
        }
    }
    CudaFence(const CudaFence&) = delete;
    CudaFence& operator=(const CudaFence&) = delete;

    [[nodiscard]] Event event() const noexcept { return event_.get(); }

private:
    std::shared_ptr<DeviceContext> context_;
    EventHandle event_;
};

/// What a lane's event ends. The lane and its backend outlive it: a transaction drops its works
/// when it closes, and a backend dies only without transactions.
class CudaWork final : public Work {
public:
    CudaWork(std::shared_ptr<DeviceContext> context, Event event,
             const volatile std::uint32_t* tile_error)
        : context_(std::move(context)), event_(event), tile_error_(tile_error) {}

    State poll() noexcept override {
        const Lock lock(mutex_);
        if (state_ != State::running) {
            return state_;
        }
        try {
            const Driver& driver = context_->driver();
            const DeviceContext::Scope scope(*context_);
            const Result result = driver.event_query(event_);
            if (result == kNotReady) {
                return state_;
            }
            if (result != kSuccess) {
                fail_call(driver, result, "event_query", __FILE_NAME__, __LINE__);
            }
            failed_looks_ = 0;
            if (*tile_error_ == kTileOk) {
                state_ = State::done;
            } else {
                state_ = State::failed;
                failure_ = Error(SPARKCACHE_DEVICE, *tile_error_ == kTileBounds
                                                        ? "a kernel met a tile out of bounds"
                                                        : "a kernel met a tile of wrong length");
            }
        } catch (const Error& error) {
            // The driver reports here what any earlier work has come to, from then on always:
            // the context runs nothing any more, so this work is over too. An error that does not
            // last says nothing about the work, which may still run: look again.
            if (++failed_looks_ >= kLooksToBelieve) {
                context_->mark_failed(error.what());
                state_ = State::failed;
                failure_ = error;
            }
        }
        return state_;
    }

    [[nodiscard]] const char* failure() const noexcept override { return failure_.what(); }

    void order(std::uint64_t stream) override {
        const Lock lock(mutex_);
        if (state_ == State::running) {
            const DeviceContext::Scope scope(*context_);
            SPARKCACHE_CUDA_TRY(context_->driver(),
                                stream_wait_event(reinterpret_cast<Stream>(
                                                      static_cast<std::uintptr_t>(stream)),
                                                  event_, 0));
        }
    }

private:
    std::shared_ptr<DeviceContext> context_;
    Event event_;
    const volatile std::uint32_t* tile_error_;
    Mutex mutex_;
    int failed_looks_ = 0;
    State state_ = State::running;
    Error failure_{SPARKCACHE_OK, ""};
};

}  // namespace

/// An arena with everything that moves it.
struct CudaBackend::Lane {
    Lane(const Driver& driver, std::size_t bytes, std::size_t tiles, bool is_mapped)
        : host(allocate_pinned(driver, bytes)),
          tile_host(allocate_pinned(driver, tiles * sizeof(Tile))),
          error_host(allocate_pinned(driver, sizeof(std::uint32_t))),
          stream(make_lowest_priority_stream(driver)),
          event(make_event(driver)),
          error_address(device_address(driver, error_host)) {
        if (is_mapped) {
            arena_address = device_address(driver, host);
            tile_address = device_address(driver, tile_host);
        } else {
            staging = allocate_on_device(driver, bytes);
            tile_staging = allocate_on_device(driver, tiles * sizeof(Tile));
            arena_address = staging.get();
            tile_address = tile_staging.get();
        }
    }

    [[nodiscard]] Tile* tiles() const { return static_cast<Tile*>(tile_host.get()); }
    [[nodiscard]] volatile std::uint32_t* error() const {
        return static_cast<volatile std::uint32_t*>(error_host.get());
    }

    PinnedMemory host;
    PinnedMemory tile_host;
    PinnedMemory error_host;
    DeviceMemory staging;       ///< staged mode
    DeviceMemory tile_staging;  ///< staged mode
    StreamHandle stream;
    EventHandle event;
    DevicePointer arena_address = 0;  ///< where kernels find the arena's bytes
    DevicePointer tile_address = 0;
    DevicePointer error_address = 0;
};

CudaBackend::CudaBackend(const sparkcache_config& config, unsigned threads)
    : context_(std::make_shared<DeviceContext>(config.device)),
      mapped_(config.transfer == SPARKCACHE_TRANSFER_MAPPED),
      arena_bytes_(config.arena_bytes),
      tile_capacity_(std::max<std::uint64_t>(config.arena_bytes / kPlannedPiece, 1024)),
      threads_(threads) {
    check_fatbin(config.fatbin, config.fatbin_bytes);
    const Driver& driver = context_->driver();
    if (config.transfer == SPARKCACHE_TRANSFER_AUTO) {
        mapped_ = context_->attribute(kIntegrated) != 0;
    }
    if (mapped_ && context_->attribute(kCanMapHostMemory) == 0) {
        fail(SPARKCACHE_UNSUPPORTED, "device %d cannot map host memory; use staged transfer",
             config.device);
    }
    grid_ = static_cast<unsigned>(std::max(context_->attribute(kMultiprocessorCount), 1)) *
            kBlocksPerMultiprocessor;

    // Locals first: what was made dies inside the scope if a later step fails.
    const DeviceContext::Scope scope(*context_);
    auto kernels = std::make_unique<Kernels>();
    Module module = nullptr;
    SPARKCACHE_CUDA_TRY(driver, module_load(&module, config.fatbin));
    kernels->module = ModuleHandle(driver, module);
    SPARKCACHE_CUDA_TRY(driver, module_get_function(&kernels->scatter, module, kScatterName));
    SPARKCACHE_CUDA_TRY(driver, module_get_function(&kernels->gather, module, kGatherName));
    std::vector<std::unique_ptr<Lane>> lanes;
    for (std::uint32_t i = 0; i < config.arena_count; ++i) {
        lanes.push_back(
            std::make_unique<Lane>(driver, config.arena_bytes, tile_capacity_, mapped_));
    }
    kernels_ = std::move(kernels);
    lanes_ = std::move(lanes);
}

CudaBackend::~CudaBackend() {
    try {
        const DeviceContext::Scope scope(*context_);
        lanes_.clear();
        kernels_.reset();
    } catch (const Error&) {
        // The context is gone and took everything with it; the members' frees are no-ops then.
    }
}

void CudaBackend::check_region(std::size_t layer, std::uint64_t address, std::uint64_t bytes) {
    const Driver& driver = context_->driver();
    const DeviceContext::Scope scope(*context_);
    for (const std::uint64_t at : {address, address + bytes - 1}) {
        unsigned type = 0;
        int ordinal = -1;
        const bool known =
            driver.pointer_attribute(&type, kPointerMemoryType, at) == kSuccess &&
            driver.pointer_attribute(&ordinal, kPointerDeviceOrdinal, at) == kSuccess;
        if (!known || type != kMemoryTypeDevice || ordinal != context_->ordinal()) {
            fail(SPARKCACHE_INVALID_ARGUMENT,
                 "layer %zu: its region (%llu bytes) is not memory of CUDA device %d (type %u, "
                 "device %d); describe it to a placement of its own device",
                 layer, ull{bytes}, context_->ordinal(), type, ordinal);
        }
    }
}

std::byte* CudaBackend::arena(std::size_t index) noexcept {
    return static_cast<std::byte*>(lanes_[index]->host.get());
}

std::shared_ptr<Fence> CudaBackend::fence(std::uint64_t stream) {
    context_->require_alive();
    return std::make_shared<CudaFence>(
        context_, reinterpret_cast<Stream>(static_cast<std::uintptr_t>(stream)));
}

void CudaBackend::copy_in(std::byte* to, const std::byte* from, std::size_t bytes) {
    threads_.copy(to, from, bytes);
}

void CudaBackend::launch(Lane& lane, Function kernel, std::uint64_t tiles) {
    const Driver& driver = context_->driver();
    if (!mapped_) {
        SPARKCACHE_CUDA_TRY(driver, copy_to_device(lane.tile_address, lane.tiles(),
                                                   tiles * sizeof(Tile), lane.stream.get()));
    }
    const DevicePointer tile_address = lane.tile_address;
    const DevicePointer arena_address = lane.arena_address;
    const DevicePointer error_address = lane.error_address;
    const std::uint64_t arena_bytes = arena_bytes_;
    const void* arguments[] = {&tile_address, &tiles, &arena_address, &arena_bytes,
                               &error_address};
    const auto blocks = static_cast<unsigned>(std::min<std::uint64_t>(tiles, grid_));
    SPARKCACHE_CUDA_TRY(driver, launch(kernel, blocks, 1, 1, kLanes, 1, 1, 0, lane.stream.get(),
                                       const_cast<void**>(arguments), nullptr));
    launches_.fetch_add(1, std::memory_order_relaxed);
}

void CudaBackend::launch_all(Lane& lane, Function kernel, std::span<const Move> moves) {
    std::uint64_t count = 0;
    for (const Move& move : moves) {
        std::uint64_t done = 0;
        while (done < move.length) {
            if (count == tile_capacity_) {
                launch(lane, kernel, count);
                // The descriptors are read until the kernel ends.
                SPARKCACHE_CUDA_TRY(context_->driver(), stream_synchronize(lane.stream.get()));
                count = 0;
            }
            // A short first tile lets all that follow begin on a vector boundary of the page.
            const std::uint64_t page = move.page == 0 ? 0 : move.page + done;
            const std::uint64_t most = kTileBytes - (page & 15u);
            const std::uint64_t length = std::min(move.length - done, most);
            lane.tiles()[count++] = {page, move.buffer + done, static_cast<std::uint32_t>(length),
                                     0};
            done += length;
        }
    }
    if (count > 0) {
        launch(lane, kernel, count);
    }
}

template <typename Enqueue>
std::shared_ptr<Work> CudaBackend::enqueue(Lane& lane, const Fence* after, Enqueue enqueue_all) {
    context_->require_alive();
    const Driver& driver = context_->driver();
    auto work = std::make_shared<CudaWork>(context_, lane.event.get(), lane.error());
    const DeviceContext::Scope scope(*context_);
    *lane.error() = kTileOk;
    try {
        if (after != nullptr) {
            const Event event = static_cast<const CudaFence*>(after)->event();
            SPARKCACHE_CUDA_TRY(driver, stream_wait_event(lane.stream.get(), event, 0));
        }
        enqueue_all();
        SPARKCACHE_CUDA_TRY(driver, event_record(lane.event.get(), lane.stream.get()));
    } catch (const Error&) {
        // Part of it may be on its way, and nobody could wait for it later: wait now.
        if (const Result result = driver.stream_synchronize(lane.stream.get());
            result != kSuccess) {
            context_->mark_failed(driver.name_of(result));
        }
        throw;
    }
    return work;
}

std::shared_ptr<Work> CudaBackend::scatter(std::size_t index, const std::byte* /*source*/,
                                           std::span<const Move> moves, const Fence* after) {
    Lane& lane = *lanes_[index];
    return enqueue(lane, after, [&] {
        if (!mapped_ && !moves.empty()) {
            const auto [low, high] = buffer_range(moves);
            SPARKCACHE_CUDA_TRY(context_->driver(),
                                copy_to_device(lane.arena_address + low, arena(index) + low,
                                               high - low, lane.stream.get()));
        }
        launch_all(lane, kernels_->scatter, moves);
    });
}

std::shared_ptr<Work> CudaBackend::gather(std::size_t index, std::span<const Move> moves,
                                          const Fence* after) {
    Lane& lane = *lanes_[index];
    return enqueue(lane, after, [&] {
        launch_all(lane, kernels_->gather, moves);
        if (!mapped_ && !moves.empty()) {
            const auto [low, high] = buffer_range(moves);
            SPARKCACHE_CUDA_TRY(context_->driver(),
                                copy_to_host(arena(index) + low, lane.arena_address + low,
                                             high - low, lane.stream.get()));
        }
    });
}

std::uint64_t CudaBackend::launches() const noexcept {
    return launches_.load(std::memory_order_relaxed);
}

}  // namespace sparkcache::cuda
