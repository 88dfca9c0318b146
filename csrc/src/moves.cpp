// SPDX-License-Identifier: Apache-2.0
#include "moves.h"

#include <algorithm>

namespace sparkcache {
namespace {

void append(std::vector<Move>& moves, const Move& next) {
    if (next.length == 0) {
        return;
    }
    if (!moves.empty()) {
        Move& last = moves.back();
        const bool both_zero = last.page == 0 && next.page == 0;
        const bool adjacent = last.page != 0 && next.page == last.page + last.length;
        if (last.buffer + last.length == next.buffer && (both_zero || adjacent)) {
            last.length += next.length;
            return;
        }
    }
    moves.push_back(next);
}

/// The part of a span that falls on one stretch of the page.
struct Cut {
    std::uint64_t within;  ///< offset in the stretch
    std::uint64_t buffer;
    std::uint64_t length;
};

template <typename Stretch, typename Visit>
void cut(const std::vector<Stretch>& stretches, const sparkcache_span& span, Visit visit) {
    auto stretch = std::upper_bound(
        stretches.begin(), stretches.end(), span.page_offset,
        [](std::uint64_t offset, const Stretch& s) { return offset < s.page_offset; });
    --stretch;  // the first stretch begins at 0, so there is one before
    std::uint64_t at = span.page_offset;
    const std::uint64_t end = span.page_offset + span.length;
    for (; at < end; ++stretch) {
        const std::uint64_t within = at - stretch->page_offset;
        const std::uint64_t length = std::min(end - at, stretch->length - within);
        visit(*stretch, Cut{within, span.source_offset + (at - span.page_offset), length});
        at += length;
    }
}

}  // namespace

void plan_moves(const Ledger& ledger, std::span<const sparkcache_span> spans,
                std::vector<Move>& moves) {
    for (const sparkcache_span& span : spans) {
        const Target& page = ledger.target(span.page);
        if (page.positions == SPARKCACHE_ALL_POSITIONS) {
            cut(page.group->runs, span, [&](const Run& run, const Cut& part) {
                append(moves, {run.address + page.block * run.stride + part.within, part.buffer,
                               part.length});
            });
            continue;
        }
        cut(page.group->rows, span, [&](const Row& row, const Cut& part) {
            const std::uint64_t positions =
                page.positions > row.first_position ? page.positions - row.first_position : 0;
            std::uint64_t kept = 0;
            if (__builtin_mul_overflow(positions, row.position_bytes, &kept)) {
                kept = row.length;
            }
            kept = std::min(kept, row.length);
            const std::uint64_t valid =
                kept > part.within ? std::min(kept - part.within, part.length) : 0;
            append(moves, {row.address + page.block * row.stride + part.within, part.buffer,
                           valid});
            append(moves, {0, part.buffer + valid, part.length - valid});
        });
    }
}

BufferRange buffer_range(std::span<const Move> moves) {
    BufferRange range{UINT64_MAX, 0};
    for (const Move& move : moves) {
        range.low = std::min(range.low, move.buffer);
        range.high = std::max(range.high, move.buffer + move.length);
    }
    return range;
}

}  // namespace sparkcache
