// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backend.h"

namespace sparkcache {

/// A point in time after which a call answers NOT_READY.
class Deadline {
public:
    explicit Deadline(std::uint64_t timeout_ns);
    [[nodiscard]] bool passed() const { return std::chrono::steady_clock::now() >= at_; }
    [[nodiscard]] std::chrono::steady_clock::time_point at() const noexcept { return at_; }

private:
    std::chrono::steady_clock::time_point at_;
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

    mutable std::mutex mutex_;
    std::condition_variable returned_;
    std::vector<Slot> slots_;
};

}  // namespace sparkcache
