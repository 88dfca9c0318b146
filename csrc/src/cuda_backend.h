// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backend.h"
#include "cuda_driver.h"
#include "cuda_handles.h"
#include "host_backend.h"

namespace sparkcache::cuda {

/// Pages in the memory of one CUDA device. Each arena has its own low-priority stream, so that
/// arenas overlap each other and yield to the model.
class CudaBackend final : public Backend {
public:
    /// Throws UNSUPPORTED, NO_MEMORY or DEVICE; whatever was made by then is freed.
    explicit CudaBackend(const sparkcache_config& config, unsigned threads);
    ~CudaBackend() override;
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    void check_region(std::size_t layer, std::uint64_t address, std::uint64_t bytes) override;
    [[nodiscard]] std::byte* arena(std::size_t index) noexcept override;
    std::shared_ptr<Fence> fence(std::uint64_t stream) override;
    [[nodiscard]] bool reads_any_memory() const noexcept override { return false; }
    void copy_in(std::byte* to, const std::byte* from, std::size_t bytes) override;
    std::shared_ptr<Work> scatter(std::size_t index, const std::byte* source,
                                  std::span<const Move> moves, const Fence* after) override;
    std::shared_ptr<Work> gather(std::size_t index, std::span<const Move> moves,
                                 const Fence* after) override;
    [[nodiscard]] std::uint64_t launches() const noexcept override;

private:
    struct Kernels {
        ModuleHandle module;
        Function scatter = nullptr;
        Function gather = nullptr;
    };
    struct Lane;

    /// Deal the moves as tiles and launch until all are on their way.
    void launch_all(Lane& lane, Function kernel, std::span<const Move> moves);
    void launch(Lane& lane, Function kernel, std::uint64_t tiles);
    template <typename Enqueue>
    std::shared_ptr<Work> enqueue(Lane& lane, const Fence* after, Enqueue enqueue_all);

    std::shared_ptr<DeviceContext> context_;
    bool mapped_;
    std::uint64_t arena_bytes_;
    std::uint64_t tile_capacity_;
    unsigned grid_ = 1;
    std::unique_ptr<Kernels> kernels_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    CopyThreads threads_;
    std::atomic<std::uint64_t> launches_{0};
};

}  // namespace sparkcache::cuda
