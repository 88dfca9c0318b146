// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ledger.h"
#include "sparkcache_placement.h"

namespace sparkcache {

/// Bytes that go between the engine's memory and a buffer in one piece.
struct Move {
    std::uint64_t page;    ///< address in the engine's memory; 0: the buffer gets zeros
    std::uint64_t buffer;  ///< offset in the arena or in the caller's memory
    std::uint64_t length;
};

/// Append the moves of `spans`, which the ledger has accepted. Neighbours that are adjacent on
/// both sides become one move.
void plan_moves(const Ledger& ledger, std::span<const sparkcache_span> spans,
                std::vector<Move>& moves);

/// The stretch of the buffer that moves touch: first offset, and one past the last.
struct BufferRange {
    std::uint64_t low;
    std::uint64_t high;
};
BufferRange buffer_range(std::span<const Move> moves);

}  // namespace sparkcache
