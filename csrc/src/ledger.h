// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout.h"
#include "sparkcache_placement.h"

namespace sparkcache {

/// A page of a transaction, resolved against the layout.
struct Target {
    const Group* group;
    std::uint64_t block;
    std::uint64_t positions;  ///< kept by a capture; SPARKCACHE_ALL_POSITIONS otherwise
};

/// Check one page's group and block; throws INVALID_ARGUMENT naming `number`.
Target resolve(const Layout& layout, std::size_t number, std::uint32_t group, std::uint64_t block,
               std::uint64_t positions);

/// Strict coverage of one transaction: which bytes of which page are still due.
class Ledger {
public:
    /// Throws COVERAGE if two targets share a byte.
    Ledger(const Layout& layout, std::vector<Target> targets);

    [[nodiscard]] std::span<const Target> targets() const noexcept { return targets_; }

    /// Target number `page`; throws INVALID_ARGUMENT if there is none.
    [[nodiscard]] const Target& target(std::uint64_t page) const;

    /// Account for spans inside a source of `source_bytes`, all or none: throws COVERAGE for
    /// bytes that repeat or leave a gap, INVALID_ARGUMENT for spans that cannot be.
    void submit(std::span<const sparkcache_span> spans, std::uint64_t source_bytes);

    /// Throws COVERAGE unless every byte of every page was submitted.
    void require_complete() const;

private:
    void refuse_same_block(std::span<const Group> groups) const;
    void refuse_same_addresses() const;

    std::vector<Target> targets_;
    std::vector<std::uint64_t> done_;
    std::uint64_t due_ = 0;  ///< bytes over all pages
};

}  // namespace sparkcache
