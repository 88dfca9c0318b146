// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <algorithm>
#include <array>
#include <limits>

#include "status.h"

namespace sparkcache {
namespace {

constexpr std::uint64_t kMostRows = std::uint64_t{1} << 24;

using ull = unsigned long long;

/// How the bytes of two runs can meet.
enum class Meeting { never, same_block, other_blocks };

/// A run together with what decides which bytes it may share with another.
struct Lane {
    const Run* run;
    std::uint32_t group;  ///< index of the group
    std::uint64_t blocks;
    std::uint64_t residue;  ///< address modulo stride
};

/// Block x of `a` is [a + xS, +la), block y of `b` is [b + yS, +lb), one stride S. They meet iff
/// -lb < (b - a) + (y - x)S < la for some difference k = y - x that both have blocks for.
Meeting meet(const Lane& a, const Lane& b) {
    const auto stride = static_cast<__int128>(a.run->stride);
    const auto apart = static_cast<__int128>(b.run->address) - static_cast<__int128>(a.run->address);
    const auto floor_div = [stride](__int128 n) {
        return n >= 0 ? n / stride : -((-n + stride - 1) / stride);
    };
    __int128 low = -floor_div(static_cast<__int128>(b.run->length) - 1 + apart);
    __int128 high = floor_div(static_cast<__int128>(a.run->length) - 1 - apart);
    low = std::max(low, -(static_cast<__int128>(a.blocks) - 1));
    high = std::min(high, static_cast<__int128>(b.blocks) - 1);
    const bool same_run = a.run == b.run;
    if (same_run) {
        // Every run meets itself at k = 0; what matters is whether it reaches the next block.
        return high >= 1 ? Meeting::other_blocks : Meeting::never;
    }
    if (low > high) {
        return Meeting::never;
    }
    return low == 0 && high == 0 ? Meeting::same_block : Meeting::other_blocks;
}

std::uint64_t end_of(const Lane& lane) {
    return lane.run->address + (lane.blocks - 1) * lane.run->stride + lane.run->length;
}

void add_run(std::vector<Run>& runs, const Row& row, bool new_layer) {
    if (!new_layer && !runs.empty() && runs.back().address + runs.back().length == row.address) {
        runs.back().length += row.length;
    } else {
        runs.push_back({row.address, row.stride, row.page_offset, row.length});
    }
}

}  // namespace

Layout::Layout(std::span<const sparkcache_layer> layers,
               std::span<const sparkcache_extent> extents) {
    if (layers.empty()) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "no layers; describe at least one");
    }
    std::uint64_t row_count = 0;
    for (std::size_t number = 0; number < layers.size(); ++number) {
        const sparkcache_layer& layer = layers[number];
        if (layer.blocks < 1 || layer.page_stride < 1 || layer.reserved != 0) {
            fail(SPARKCACHE_INVALID_ARGUMENT,
                 "layer %zu: %llu blocks, stride %llu, reserved %u; expected >= 1, >= 1, 0", number,
                 ull{layer.blocks}, ull{layer.page_stride}, layer.reserved);
        }
        if (layer.extent_count < 1 ||
            checked_add(layer.first_extent, layer.extent_count, "extents") > extents.size()) {
            fail(SPARKCACHE_INVALID_ARGUMENT,
                 "layer %zu: extents %llu + %llu of %zu; name at least one that is described",
                 number, ull{layer.first_extent}, ull{layer.extent_count}, extents.size());
        }
        checked_add(layer.region, layer.region_bytes, "region");
        const auto [found, fresh] = index_.try_emplace(layer.group, groups_.size());
        if (fresh) {
            groups_.push_back({layer.group, layer.blocks, 0, {}, {}, {}});
        }
        Group& group = groups_[found->second];
        group.blocks = std::min(group.blocks, layer.blocks);
        const std::uint64_t last_block = checked_add(
            layer.base, checked_mul(layer.blocks - 1, layer.page_stride, "blocks"), "base");
        bool new_layer = true;
        for (const sparkcache_extent& extent :
             extents.subspan(layer.first_extent, layer.extent_count)) {
            if (extent.positions < 1 || extent.position_bytes < 1 || extent.repeat < 1) {
                fail(SPARKCACHE_INVALID_ARGUMENT,
                     "layer %zu: extent of %llu positions, %llu bytes each, %llu rows; each must "
                     "be >= 1",
                     number, ull{extent.positions}, ull{extent.position_bytes},
                     ull{extent.repeat});
            }
            checked_add(extent.first_position, extent.positions, "positions");
            const std::uint64_t row_bytes =
                checked_mul(extent.positions, extent.position_bytes, "extent");
            const std::uint64_t last_row = checked_add(
                extent.offset, checked_mul(extent.repeat - 1, extent.repeat_stride, "rows"),
                "rows");
            const std::uint64_t end = checked_add(
                checked_add(last_block, last_row, "extent"), row_bytes, "extent");
            if (end > layer.region_bytes) {
                fail(SPARKCACHE_INVALID_ARGUMENT,
                     "layer %zu: block %llu ends at byte %llu of a region of %llu; fix the "
                     "geometry",
                     number, ull{layer.blocks - 1}, ull{end}, ull{layer.region_bytes});
            }
            row_count = checked_add(row_count, extent.repeat, "rows");
            if (row_count > kMostRows) {
                fail(SPARKCACHE_INVALID_ARGUMENT, "more than %llu rows; describe larger extents",
                     ull{kMostRows});
            }
            for (std::uint64_t r = 0; r < extent.repeat; ++r) {
                const Row row{layer.region + layer.base + extent.offset + r * extent.repeat_stride,
                              layer.page_stride,
                              group.page_bytes,
                              row_bytes,
                              extent.first_position,
                              extent.position_bytes};
                add_run(group.runs, row, new_layer);
                group.rows.push_back(row);
                group.page_bytes = checked_add(group.page_bytes, row_bytes, "page");
                new_layer = false;
            }
        }
    }
    for (const Group& group : groups_) {
        largest_page_ = std::max(largest_page_, group.page_bytes);
    }
    find_shared_bytes();
}

const Group* Layout::find(std::uint32_t group) const noexcept {
    const auto found = index_.find(group);
    return found == index_.end() ? nullptr : &groups_[found->second];
}

/// Engines lay groups over each other and keep blocks apart by number alone: block 7 belongs to
/// one group at a time. That case is decided here, once, so that opening a transaction compares
/// block numbers. Whatever else may overlap is left to a comparison of addresses.
void Layout::find_shared_bytes() {
    std::vector<Lane> lanes;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        groups_[g].same_block.push_back(static_cast<std::uint32_t>(g));
        for (const Run& run : groups_[g].runs) {
            lanes.push_back({&run, static_cast<std::uint32_t>(g), groups_[g].blocks,
                             run.address % run.stride});
        }
    }
    const auto note = [this](const Lane& a, const Lane& b) {
        switch (meet(a, b)) {
            case Meeting::never:
                break;
            case Meeting::same_block:
                if (a.group == b.group) {
                    compare_addresses_ = true;  // a page that overlaps itself
                } else {
                    groups_[a.group].same_block.push_back(b.group);
                    groups_[b.group].same_block.push_back(a.group);
                }
                break;
            case Meeting::other_blocks:
                compare_addresses_ = true;
                break;
        }
    };

    // Equal strides: only runs whose residues meet can meet. Sweep over residues; a run that
    // wraps past the stride is entered once more, one stride earlier.
    struct Entry {
        std::uint64_t stride;
        __int128 begin;
        __int128 end;
        std::size_t lane;
    };
    std::vector<Entry> entries;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
        const Run& run = *lanes[i].run;
        if (run.length > run.stride) {
            compare_addresses_ |= meet(lanes[i], lanes[i]) != Meeting::never;
        }
        const auto begin = static_cast<__int128>(lanes[i].residue);
        const auto stride = static_cast<__int128>(run.stride);
        const auto end = begin + static_cast<__int128>(std::min(run.length, run.stride));
        entries.push_back({run.stride, begin, end, i});
        if (end > stride) {
            entries.push_back({run.stride, begin - stride, end - stride, i});
        }
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.stride != b.stride ? a.stride < b.stride : a.begin < b.begin;
    });
    for (std::size_t i = 0; i < entries.size() && !compare_addresses_; ++i) {
        for (std::size_t j = i + 1; j < entries.size() && entries[j].stride == entries[i].stride &&
                                    entries[j].begin < entries[i].end;
             ++j) {
            if (entries[i].lane != entries[j].lane) {
                note(lanes[entries[i].lane], lanes[entries[j].lane]);
            }
        }
    }

    // Different strides in one place: no rule about block numbers holds.
    std::sort(lanes.begin(), lanes.end(),
              [](const Lane& a, const Lane& b) { return a.run->address < b.run->address; });
    std::uint64_t reach = 0;
    std::uint64_t reach_stride = 0;
    bool mixed = false;  // the bytes up to `reach` are covered with more than one stride
    for (const Lane& lane : lanes) {
        if (lane.run->address < reach) {
            mixed |= lane.run->stride != reach_stride;
            compare_addresses_ |= mixed;
        } else {
            mixed = false;
            reach_stride = lane.run->stride;
        }
        reach = std::max(reach, end_of(lane));
    }

    for (Group& group : groups_) {
        std::sort(group.same_block.begin(), group.same_block.end(),
                  [](std::uint32_t a, std::uint32_t b) { return a < b; });
        group.same_block.erase(std::unique(group.same_block.begin(), group.same_block.end()),
                               group.same_block.end());
    }
}

}  // namespace sparkcache
