// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "moves.h"
#include "sparkcache_placement.h"

namespace sparkcache {

/// Work on a device that was started and may still run. Shared by the arena that it uses and by
/// the transaction that asked for it, so that each learns how it ended.
class Work {
public:
    virtual ~Work() = default;

    enum class State { running, done, failed };

    /// Look, without blocking. Never throws; running work never goes back from done or failed.
    virtual State poll() noexcept = 0;

    /// Why it failed; valid once poll() said so.
    [[nodiscard]] virtual const char* failure() const noexcept = 0;

    /// Make a stream of the engine wait for this.
    virtual void order(std::uint64_t stream) = 0;
};

/// A point in a stream of the engine.
class Fence {
public:
    virtual ~Fence() = default;
};

/// Who copies: the host's threads or a device. Arenas are numbered; the caller sees to it that an
/// arena has at most one work at a time.
class Backend {
public:
    virtual ~Backend() = default;

    /// Throw INVALID_ARGUMENT unless the layer's memory is this backend's.
    virtual void check_region(std::size_t layer, std::uint64_t address, std::uint64_t bytes) = 0;

    [[nodiscard]] virtual std::byte* arena(std::size_t index) noexcept = 0;

    /// Null where the engine's work is done when its calls return.
    virtual std::shared_ptr<Fence> fence(std::uint64_t stream) = 0;

    /// Whether scatter() can read the caller's memory, or only arenas.
    [[nodiscard]] virtual bool reads_any_memory() const noexcept = 0;

    /// A plain host copy into an arena, with this backend's threads if that is worth it.
    virtual void copy_in(std::byte* to, const std::byte* from, std::size_t bytes) = 0;

    /// Start to write pages out of memory that begins at `source`; null if done on return.
    /// `source` is arena `index` unless reads_any_memory().
    virtual std::shared_ptr<Work> scatter(std::size_t index, const std::byte* source,
                                          std::span<const Move> moves, const Fence* after) = 0;

    /// Start to read pages into arena `index`; null if done on return.
    virtual std::shared_ptr<Work> gather(std::size_t index, std::span<const Move> moves,
                                         const Fence* after) = 0;

    [[nodiscard]] virtual std::uint64_t launches() const noexcept = 0;
};

}  // namespace sparkcache
