// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "sparkcache_placement.h"

namespace sparkcache {

/// One contiguous stretch of an encoded page, token positions in it.
struct Row {
    std::uint64_t address;  ///< in block 0
    std::uint64_t stride;   ///< from one block to the next
    std::uint64_t page_offset;
    std::uint64_t length;
    std::uint64_t first_position;
    std::uint64_t position_bytes;
};

/// Rows that are adjacent in the page and in memory, merged: one copy for a whole page.
struct Run {
    std::uint64_t address;
    std::uint64_t stride;
    std::uint64_t page_offset;
    std::uint64_t length;
};

struct Group {
    std::uint32_t id;
    std::uint64_t blocks;  ///< that every layer of the group has
    std::uint64_t page_bytes;
    std::vector<Row> rows;
    std::vector<Run> runs;
    /// Groups, this one included, in which the same block number means shared bytes.
    std::vector<std::uint32_t> same_block;
};

/// The pages of one rank. Immutable once built; every address of every block has been checked
/// to lie inside its region, so nothing downstream checks again.
class Layout {
public:
    Layout(std::span<const sparkcache_layer> layers, std::span<const sparkcache_extent> extents);

    [[nodiscard]] const Group* find(std::uint32_t group) const noexcept;
    [[nodiscard]] std::span<const Group> groups() const noexcept { return groups_; }
    [[nodiscard]] std::uint64_t largest_page() const noexcept { return largest_page_; }

    /// Whether different block numbers may share bytes somewhere, so that destinations must be
    /// compared by address. False for every layout that keeps blocks apart by their number.
    [[nodiscard]] bool compare_addresses() const noexcept { return compare_addresses_; }

private:
    void find_shared_bytes();

    std::vector<Group> groups_;
    std::map<std::uint32_t, std::size_t> index_;
    std::uint64_t largest_page_ = 0;
    bool compare_addresses_ = false;
};

}  // namespace sparkcache
