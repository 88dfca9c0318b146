// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <algorithm>
#include <utility>

#include "status.h"

namespace sparkcache {
namespace {

using ull = unsigned long long;

[[noreturn]] void fail_shared(std::span<const Target> targets, std::size_t a, std::size_t b) {
    const auto [first, second] = std::minmax(a, b);
    fail(SPARKCACHE_COVERAGE,
         "page %zu (group %u, block %llu) and page %zu (group %u, block %llu) share bytes; name "
         "each destination once",
         first, targets[first].group->id, ull{targets[first].block}, second,
         targets[second].group->id, ull{targets[second].block});
}

}  // namespace

Target resolve(const Layout& layout, std::size_t number, std::uint32_t group, std::uint64_t block,
               std::uint64_t positions) {
    const Group* found = layout.find(group);
    if (found == nullptr) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "page %zu: group %u has no layers here; describe it",
             number, group);
    }
    if (block == 0) {
        fail(SPARKCACHE_INVALID_ARGUMENT,
             "page %zu: group %u: block 0 is the null block; name an allocated block", number,
             group);
    }
    if (block >= found->blocks) {
        fail(SPARKCACHE_INVALID_ARGUMENT,
             "page %zu: group %u: block %llu of %llu; name an allocated block", number, group,
             ull{block}, ull{found->blocks});
    }
    if (positions < 1) {
        fail(SPARKCACHE_INVALID_ARGUMENT,
             "page %zu: group %u: keep 0 positions; keep at least one, or leave the page out",
             number, group);
    }
    return {found, block, positions};
}

Ledger::Ledger(const Layout& layout, std::vector<Target> targets)
    : targets_(std::move(targets)), done_(targets_.size(), 0) {
    if (targets_.empty()) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "no pages; a transaction names at least one");
    }
    if (layout.compare_addresses()) {
        refuse_same_addresses();
    } else {
        refuse_same_block(layout.groups());
    }
    for (const Target& target : targets_) {
        due_ = checked_add(due_, target.group->page_bytes, "pages");
    }
}

void Ledger::refuse_same_block(std::span<const Group> groups) const {
    std::vector<std::size_t> order(targets_.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
        return targets_[a].block < targets_[b].block;
    });
    for (std::size_t i = 0; i < order.size(); ++i) {
        const Target& a = targets_[order[i]];
        const auto& meets = a.group->same_block;
        for (std::size_t j = i + 1; j < order.size(); ++j) {
            const Target& b = targets_[order[j]];
            if (b.block != a.block) {
                break;
            }
            const auto index = static_cast<std::uint32_t>(b.group - groups.data());
            if (std::binary_search(meets.begin(), meets.end(), index)) {
                fail_shared(targets_, order[i], order[j]);
            }
        }
    }
}

void Ledger::refuse_same_addresses() const {
    struct Interval {
        std::uint64_t begin;
        std::uint64_t end;
        std::size_t target;
    };
    std::vector<Interval> intervals;
    for (std::size_t i = 0; i < targets_.size(); ++i) {
        for (const Run& run : targets_[i].group->runs) {
            const std::uint64_t begin = run.address + targets_[i].block * run.stride;
            intervals.push_back({begin, begin + run.length, i});
        }
    }
    std::sort(intervals.begin(), intervals.end(),
              [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < intervals.size(); ++i) {
        if (intervals[i].begin < intervals[i - 1].end) {
            fail_shared(targets_, intervals[i - 1].target, intervals[i].target);
        }
    }
}

const Target& Ledger::target(std::uint64_t page) const {
    if (page >= targets_.size()) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "span names page %llu of %zu; number from 0", ull{page},
             targets_.size());
    }
    return targets_[page];
}

void Ledger::submit(std::span<const sparkcache_span> spans, std::uint64_t source_bytes) {
    std::size_t accepted = 0;
    std::uint64_t bytes = 0;
    try {
        for (const sparkcache_span& span : spans) {
            const Target& page = target(span.page);
            const std::uint64_t size = page.group->page_bytes;
            if (span.length < 1) {
                fail(SPARKCACHE_INVALID_ARGUMENT, "span of page %llu has length 0",
                     ull{span.page});
            }
            if (span.page_offset > size || span.length > size - span.page_offset) {
                fail(SPARKCACHE_INVALID_ARGUMENT,
                     "span %llu + %llu of page %llu passes its page's end at %llu",
                     ull{span.page_offset}, ull{span.length}, ull{span.page}, ull{size});
            }
            if (span.source_offset > source_bytes ||
                span.length > source_bytes - span.source_offset) {
                fail(SPARKCACHE_INVALID_ARGUMENT,
                     "span of page %llu at %llu + %llu passes its source's end at %llu",
                     ull{span.page}, ull{span.source_offset}, ull{span.length}, ull{source_bytes});
            }
            if (span.page_offset != done_[span.page]) {
                fail(SPARKCACHE_COVERAGE,
                     "span of page %llu begins at %llu, due is %llu; submit each byte once, in "
                     "ascending order",
                     ull{span.page}, ull{span.page_offset}, ull{done_[span.page]});
            }
            done_[span.page] += span.length;
            bytes += span.length;
            ++accepted;
        }
    } catch (...) {
        for (const sparkcache_span& span : spans.first(accepted)) {
            done_[span.page] -= span.length;
        }
        throw;
    }
    due_ -= bytes;
}

void Ledger::require_complete() const {
    if (due_ == 0) {
        return;
    }
    for (std::size_t i = 0; i < targets_.size(); ++i) {
        const Target& page = targets_[i];
        if (done_[i] != page.group->page_bytes) {
            fail(SPARKCACHE_COVERAGE,
                 "page %zu (group %u, block %llu): %llu of %llu bytes were submitted; submit the "
                 "rest, or abort",
                 i, page.group->id, ull{page.block}, ull{done_[i]}, ull{page.group->page_bytes});
        }
    }
}

}  // namespace sparkcache
