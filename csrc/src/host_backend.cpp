// SPDX-License-Identifier: Apache-2.0
#include "host_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "host_copy.h"
#include "status.h"

namespace sparkcache {
namespace {

/// What a thread claims at a time: far above the cost of claiming, small enough to end together.
constexpr std::uint64_t kClaimBytes = 512 << 10;
/// Below this, waking a thread costs more than it saves.
constexpr std::uint64_t kShareBytes = 1 << 20;
/// Jobs from this size on do not fit the caches with what else is there, so they go past them.
constexpr std::uint64_t kStreamBytes = 4 << 20;
/// Transparent huge pages come in this size; arenas reserve whole ones.
constexpr std::size_t kHugePage = 2 << 20;

std::byte* pointer(std::uint64_t address) {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

void copy_part(const Move& move, std::uint64_t skip, std::uint64_t bytes, std::byte* buffer,
               CopyThreads::Direction direction, bool stream) {
    std::byte* const at = buffer + move.buffer + skip;
    if (move.page == 0) {
        std::memset(at, 0, bytes);
        return;
    }
    std::byte* const page = pointer(move.page) + skip;
    const bool to_pages = direction == CopyThreads::Direction::to_pages;
    std::byte* const to = to_pages ? page : at;
    const std::byte* const from = to_pages ? at : page;
    if (stream) {
        stream_copy(to, from, bytes);
    } else {
        std::memcpy(to, from, bytes);
    }
}

/// Ask early for the page of `moves[index]`, which is copied next.
void expect(std::span<const Move> moves, std::size_t index, CopyThreads::Direction direction) {
    if (index >= moves.size() || moves[index].page == 0) {
        return;
    }
    if (direction == CopyThreads::Direction::to_pages) {
        expect_write(pointer(moves[index].page));
    } else {
        expect_read(pointer(moves[index].page), moves[index].length);
    }
}

}  // namespace

HostArena::HostArena(std::size_t bytes) : data_(nullptr), bytes_(bytes) {
    // Reserve one huge page more, so that the arena can begin on a huge page.
    const std::size_t reserved = bytes + kHugePage;
    void* const memory = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fail(SPARKCACHE_NO_MEMORY,
             "arena of %zu bytes: %s; lower spark_cache_cuda_placement_arena_bytes", bytes,
             std::strerror(errno));
    }
    auto* const begin = static_cast<std::byte*>(memory);
    const std::size_t lead = -reinterpret_cast<std::uintptr_t>(memory) & (kHugePage - 1);
    if (lead > 0) {
        ::munmap(begin, lead);
    }
    data_ = begin + lead;
    ::munmap(data_ + bytes, reserved - lead - bytes);
    ::madvise(data_, bytes_, MADV_HUGEPAGE);  // advice only: without huge pages it is just slower
}

HostArena::HostArena(HostArena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

HostArena::~HostArena() {
    if (data_ != nullptr) {
        ::munmap(data_, bytes_);
    }
}

CopyThreads::CopyThreads(unsigned threads) {
    threads_.reserve(threads);
    try {
        for (unsigned i = 1; i < threads; ++i) {
            threads_.emplace_back([this] { serve(); });
        }
    } catch (const std::exception&) {
        // Fewer threads copy as well, only slower; the caller alone always suffices.
    }
}

CopyThreads::~CopyThreads() {
    {
        const Lock lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    threads_.clear();  // joins them
}

void CopyThreads::run(std::span<const Move> moves, std::byte* buffer, Direction direction) {
    std::uint64_t total = 0;
    for (const Move& move : moves) {
        total += move.length;
    }
    const bool alone = threads_.empty() || total < kShareBytes;
    const TryLock busy(busy_, !alone);
    if (!busy.held()) {
        const bool stream = total >= kStreamBytes;
        for (std::size_t index = 0; index < moves.size(); ++index) {
            if (stream) {
                expect(moves, index + 1, direction);
            }
            copy_part(moves[index], 0, moves[index].length, buffer, direction, stream);
        }
        stream_fence();
        return;
    }
    Job job{moves, buffer, direction, total};
    {
        const Lock lock(mutex_);
        job_ = &job;
        ++round_;
    }
    wake_.notify_all();
    work(job);
    const Lock lock(mutex_);
    job_ = nullptr;
    while (working_ != 0) {
        idle_.wait(mutex_);
    }
}

void CopyThreads::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const Move move{reinterpret_cast<std::uintptr_t>(to), 0, bytes};
    // Only read from: moves to pages never write into the buffer.
    run({&move, 1}, const_cast<std::byte*>(from), Direction::to_pages);
}

/// Claim stretches of the job's bytes until none is left. Claims ascend, so each thread walks
/// the moves once.
void CopyThreads::work(Job& job) {
    const bool stream = job.total >= kStreamBytes;
    std::size_t index = 0;
    std::uint64_t begins = 0;  // first byte of moves[index], counted over all moves
    for (;;) {
        std::uint64_t at = job.next.fetch_add(kClaimBytes, std::memory_order_relaxed);
        if (at >= job.total) {
            stream_fence();
            return;
        }
        const std::uint64_t end = std::min(at + kClaimBytes, job.total);
        while (begins + job.moves[index].length <= at) {
            begins += job.moves[index].length;
            ++index;
        }
        while (at < end) {
            const Move& move = job.moves[index];
            const std::uint64_t skip = at - begins;
            const std::uint64_t bytes = std::min(move.length - skip, end - at);
            if (stream) {
                expect(job.moves, index + 1, job.direction);
            }
            copy_part(move, skip, bytes, job.buffer, job.direction, stream);
            at += bytes;
            if (skip + bytes == move.length && at < end) {
                begins += move.length;
                ++index;
            }
        }
    }
}

void CopyThreads::serve() {
    std::uint64_t seen = 0;
    mutex_.lock();
    for (;;) {
        while (!stopping_ && (job_ == nullptr || round_ == seen)) {
            wake_.wait(mutex_);
        }
        if (stopping_) {
            mutex_.unlock();
            return;
        }
        seen = round_;
        Job& job = *job_;
        ++working_;
        mutex_.unlock();
        work(job);
        mutex_.lock();
        if (--working_ == 0) {
            idle_.notify_all();
        }
    }
}

HostBackend::HostBackend(std::size_t arena_count, std::size_t arena_bytes, unsigned threads)
    : threads_(threads) {
    arenas_.reserve(arena_count);
    for (std::size_t i = 0; i < arena_count; ++i) {
        arenas_.emplace_back(arena_bytes);
    }
}

void HostBackend::check_region(std::size_t layer, std::uint64_t address,
                               std::uint64_t /*bytes*/) {
    if (address == 0) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "layer %zu: region at address 0", layer);
    }
}

std::byte* HostBackend::arena(std::size_t index) noexcept {
    return arenas_[index].data();
}

std::shared_ptr<Fence> HostBackend::fence(std::uint64_t /*stream*/) {
    return nullptr;
}

void HostBackend::copy_in(std::byte* to, const std::byte* from, std::size_t bytes) {
    threads_.copy(to, from, bytes);
}

std::shared_ptr<Work> HostBackend::scatter(std::size_t /*index*/, const std::byte* source,
                                           std::span<const Move> moves, const Fence* /*after*/) {
    // Only read from: moves to pages never write into the buffer.
    threads_.run(moves, const_cast<std::byte*>(source), CopyThreads::Direction::to_pages);
    launches_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
}

std::shared_ptr<Work> HostBackend::gather(std::size_t index, std::span<const Move> moves,
                                          const Fence* /*after*/) {
    threads_.run(moves, arenas_[index].data(), CopyThreads::Direction::to_buffer);
    launches_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
}

std::uint64_t HostBackend::launches() const noexcept {
    return launches_.load(std::memory_order_relaxed);
}

}  // namespace sparkcache
