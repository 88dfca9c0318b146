// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backend.h"
#include "sync.h"

namespace sparkcache {

/// A point in time after which a call answers NOT_READY.
class Deadline {
public:
    explicit Deadline(std::uint64_t timeout_ns);
    [[nodiscard]] bool passed() const { return now_ns() >= at_; }
    [[nodiscard]] std::uint64_t at() const noexcept { return at_; }

private:
    std::uint64_t at_;  ///< nanoseconds of the monotonic clock
};

/// Look at work until it is no longer running; returns `running` only when the deadline passed.
Work::State await(Work& work, const Deadline& deadline);

/// Which arena is lent to whom. An arena that was given back while its last work still runs is
/// lent again once that is over.
class ArenaPool {
public:
    explicit ArenaPool(std::size_t count) : slots_(count) {}

    /// Lend a free arena to `borrower`; throws NOT_READY at the deadline.
    std::size_t acquire(const void* borrower, const Deadline& deadline);

    /// Throw INVALID_STATE unless `index` is lent to `borrower`.
    void require_lent(std::size_t index, const void* borrower) const;

    /// Take an arena back; `work` is what still uses it, or null.
    void give_back(std::size_t index, std::shared_ptr<Work> work);

    /// Take back everything that `borrower` has.
    void give_back_all(const void* borrower);

private:
    struct Slot {
        const void* borrower = nullptr;
        std::shared_ptr<Work> work;
    };

    mutable Mutex mutex_;
    Condition returned_;
    std::vector<Slot> slots_;
};

}  // namespace sparkcache
