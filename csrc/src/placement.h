// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "arenas.h"
#include "backend.h"
#include "layout.h"
#include "ledger.h"
#include "moves.h"
#include "sparkcache_placement.h"

namespace sparkcache {

/// What a handle points at. Checked on every entry, so that a handle of one kind that is passed
/// as another is refused, and one that was freed most likely too.
enum class Kind : std::uint64_t {
    freed = 0x6465657266ULL,
    placement = 0x7370632d706c6163ULL,
    fence = 0x7370632d66656e63ULL,
    restore = 0x7370632d72657374ULL,
    placing = 0x7370632d77726974ULL,
    capture = 0x7370632d63617074ULL,
};

struct Tagged {
    explicit Tagged(Kind k) noexcept : kind(k) {}
    // Volatile: a store to an object about to be freed is otherwise dropped.
    ~Tagged() { kind = Kind::freed; }
    Tagged(const Tagged&) = delete;
    Tagged& operator=(const Tagged&) = delete;
    volatile Kind kind;
};

struct FenceHandle : Tagged {
    explicit FenceHandle(std::shared_ptr<Fence> at)
        : Tagged(Kind::fence), fence(std::move(at)) {}
    std::shared_ptr<Fence> fence;  ///< null on the host
};

struct Counters {
    std::atomic<std::uint64_t> bytes_restored{0};
    std::atomic<std::uint64_t> bytes_captured{0};
    std::atomic<std::uint64_t> pages_restored{0};
    std::atomic<std::uint64_t> pages_captured{0};
    std::atomic<std::uint64_t> finished{0};
    std::atomic<std::uint64_t> aborted{0};
    std::atomic<std::uint64_t> open{0};
};

/// Geometry, arenas and a backend; transactions borrow from it.
class Placement : public Tagged {
public:
    explicit Placement(const sparkcache_config& config);

    void describe(std::span<const sparkcache_layer> layers,
                  std::span<const sparkcache_extent> extents);
    /// Throws INVALID_STATE before describe().
    [[nodiscard]] const Layout& layout() const;
    [[nodiscard]] sparkcache_stats stats() const;

    [[nodiscard]] Backend& backend() noexcept { return *backend_; }
    [[nodiscard]] ArenaPool& arenas() noexcept { return arenas_; }
    [[nodiscard]] Counters& counters() noexcept { return counters_; }
    [[nodiscard]] std::uint64_t arena_bytes() const noexcept { return arena_bytes_; }

private:
    std::uint64_t arena_bytes_;
    std::unique_ptr<Backend> backend_;
    ArenaPool arenas_;
    std::optional<Layout> layout_;
    std::atomic<bool> described_{false};
    Counters counters_;
};

using Digest = std::array<std::uint8_t, SPARKCACHE_DIGEST_BYTES>;

/// One restore, page placement or capture: a ledger, the work it started, and how it ends.
class Transaction : public Tagged {
public:
    Transaction(Kind kind, Placement& placement, std::vector<Target> targets,
                std::vector<Digest> digests, std::shared_ptr<Fence> after);
    ~Transaction();

    [[nodiscard]] sparkcache_arena acquire(std::uint64_t timeout_ns);
    void release(std::uint64_t index);
    void submit_verified(std::uint64_t index, std::span<const sparkcache_verified_page> pages);
    void submit_memory(std::span<const std::byte> source, std::span<const sparkcache_span> spans,
                       std::uint64_t timeout_ns);
    void submit_gather(std::uint64_t index, std::span<const sparkcache_span> spans);
    void wait_gathered(std::uint64_t index, std::uint64_t timeout_ns);
    void order(std::uint64_t stream);
    void finish(std::uint64_t timeout_ns);
    void abort(std::uint64_t timeout_ns);
    [[nodiscard]] bool closed() const noexcept { return closed_; }

private:
    void require_open() const;
    void stage(std::span<const std::byte> source, std::span<const Move> moves,
               std::uint64_t timeout_ns);
    void started(std::shared_ptr<Work> work);
    /// Wait for everything that was started; the failure of the first that failed, if any.
    [[nodiscard]] std::shared_ptr<Work> drain(std::uint64_t timeout_ns);
    void close(bool finished);

    Placement& placement_;
    Ledger ledger_;
    std::vector<Digest> digests_;
    std::shared_ptr<Fence> after_;
    std::vector<std::shared_ptr<Work>> works_;
    std::map<std::uint64_t, std::shared_ptr<Work>> gathered_;  ///< by arena
    std::vector<Move> moves_;                                  ///< reused
    std::uint64_t bytes_ = 0;
    bool broken_ = false;  ///< the ledger is ahead of what was written
    bool closed_ = false;
};

}  // namespace sparkcache
