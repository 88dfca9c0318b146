// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <vector>

#include "backend.h"
#include "sync.h"

namespace sparkcache {

/// Host memory that begins and ends on SPARKCACHE_ARENA_ALIGNMENT, in huge pages where there are.
class HostArena {
public:
    explicit HostArena(std::size_t bytes);
    ~HostArena();
    HostArena(HostArena&& other) noexcept;
    HostArena(const HostArena&) = delete;
    HostArena& operator=(const HostArena&) = delete;
    HostArena& operator=(HostArena&&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }

private:
    std::byte* data_;
    std::size_t bytes_;
};

/// Copies that are worth it are shared between the calling thread and a few workers. Callers
/// that come while the workers are busy copy alone rather than wait.
class CopyThreads {
public:
    enum class Direction { to_pages, to_buffer };

    /// `threads` counts the caller.
    explicit CopyThreads(unsigned threads);
    ~CopyThreads();
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;

    /// Carry out the moves between pages and the buffer that begins at `buffer`.
    void run(std::span<const Move> moves, std::byte* buffer, Direction direction);

    /// A plain copy, shared alike.
    void copy(std::byte* to, const std::byte* from, std::size_t bytes);

private:
    struct Job {
        std::span<const Move> moves;
        std::byte* buffer;
        Direction direction;
        std::uint64_t total;
        std::atomic<std::uint64_t> next{0};  ///< first byte that nobody has claimed
    };

    static void work(Job& job);
    void serve();

    Mutex busy_;  ///< held by the caller whose job the workers do
    Mutex mutex_;
    Condition wake_;
    Condition idle_;
    Job* job_ = nullptr;
    std::uint64_t round_ = 0;
    unsigned working_ = 0;
    bool stopping_ = false;
    std::vector<Thread> threads_;
};

/// Pages in host memory: everything is done when the call returns.
class HostBackend final : public Backend {
public:
    HostBackend(std::size_t arena_count, std::size_t arena_bytes, unsigned threads);

    void check_region(std::size_t layer, std::uint64_t address, std::uint64_t bytes) override;
    [[nodiscard]] std::byte* arena(std::size_t index) noexcept override;
    std::shared_ptr<Fence> fence(std::uint64_t stream) override;
    [[nodiscard]] bool reads_any_memory() const noexcept override { return true; }
    void copy_in(std::byte* to, const std::byte* from, std::size_t bytes) override;
    std::shared_ptr<Work> scatter(std::size_t index, const std::byte* source,
                                  std::span<const Move> moves, const Fence* after) override;
    std::shared_ptr<Work> gather(std::size_t index, std::span<const Move> moves,
                                 const Fence* after) override;
    [[nodiscard]] std::uint64_t launches() const noexcept override;

private:
    std::vector<HostArena> arenas_;
    CopyThreads threads_;
    std::atomic<std::uint64_t> launches_{0};
};

}  // namespace sparkcache
