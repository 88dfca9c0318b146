// SPDX-License-Identifier: Apache-2.0
#include "arenas.h"

#include <algorithm>
#include <utility>

#include "status.h"

namespace sparkcache {
namespace {

/// Far enough away to be never, near enough not to overflow the clock.
constexpr std::uint64_t kNever = std::uint64_t{365} * 24 * 3600 * 1'000'000'000;

/// How long to sleep between two looks at work on a device: short at first, for the kernel that is
/// nearly done, then long enough to cost nothing.
class Backoff {
public:
    /// Nanoseconds.
    std::uint64_t next() {
        const std::uint64_t now = pause_;
        pause_ = std::min<std::uint64_t>(pause_ * 2, 500'000);
        return now;
    }

private:
    std::uint64_t pause_ = 10'000;
};

}  // namespace

Deadline::Deadline(std::uint64_t timeout_ns) : at_(now_ns() + std::min(timeout_ns, kNever)) {}

Work::State await(Work& work, const Deadline& deadline) {
    Backoff backoff;
    for (;;) {
        const Work::State state = work.poll();
        if (state != Work::State::running || deadline.passed()) {
            return state;
        }
        sleep_ns(backoff.next());
    }
}

std::size_t ArenaPool::acquire(const void* borrower, const Deadline& deadline) {
    Backoff backoff;
    const Lock lock(mutex_);
    for (;;) {
        bool in_flight = false;
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            Slot& slot = slots_[i];
            if (slot.borrower != nullptr) {
                continue;
            }
            // Failed work is over too; whoever asked for it is told by the work itself.
            if (slot.work != nullptr && slot.work->poll() == Work::State::running) {
                in_flight = true;
                continue;
            }
            slot.work.reset();
            slot.borrower = borrower;
            return i;
        }
        if (deadline.passed()) {
            fail(SPARKCACHE_NOT_READY, "none of %zu arenas became free in time; call again",
                 slots_.size());
        }
        // Work on a device ends without a notification, so look again soon.
        returned_.wait_until(mutex_, in_flight ? std::min(deadline.at(), now_ns() + backoff.next())
                                               : deadline.at());
    }
}

void ArenaPool::require_lent(std::size_t index, const void* borrower) const {
    const Lock lock(mutex_);
    if (index >= slots_.size() || slots_[index].borrower != borrower) {
        fail(SPARKCACHE_INVALID_STATE,
             "arena %zu is not lent to this transaction; acquire one and use it once", index);
    }
}

void ArenaPool::give_back(std::size_t index, std::shared_ptr<Work> work) {
    {
        const Lock lock(mutex_);
        slots_[index] = {nullptr, std::move(work)};
    }
    returned_.notify_one();
}

void ArenaPool::give_back_all(const void* borrower) {
    {
        const Lock lock(mutex_);
        for (Slot& slot : slots_) {
            if (slot.borrower == borrower) {
                slot = {};
            }
        }
    }
    returned_.notify_all();
}

}  // namespace sparkcache
