// SPDX-License-Identifier: Apache-2.0
#include "arenas.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "status.h"

namespace sparkcache {
namespace {

using namespace std::chrono_literals;

/// Far enough away to be never, near enough not to overflow the clock.
constexpr std::uint64_t kNever = std::uint64_t{365} * 24 * 3600 * 1'000'000'000;

/// How long to sleep between two looks at work on a device: short at first, for the kernel that is
/// nearly done, then long enough to cost nothing.
class Backoff {
public:
    std::chrono::microseconds next() {
        const auto now = pause_;
        pause_ = std::min<std::chrono::microseconds>(pause_ * 2, 500us);
        return now;
    }

private:
    std::chrono::microseconds pause_{10};
};

}  // namespace

Deadline::Deadline(std::uint64_t timeout_ns)
    : at_(std::chrono::steady_clock::now() +
          std::chrono::nanoseconds(std::min(timeout_ns, kNever))) {}

Work::State await(Work& work, const Deadline& deadline) {
    Backoff backoff;
    for (;;) {
        const Work::State state = work.poll();
        if (state != Work::State::running || deadline.passed()) {
            return state;
        }
        std::this_thread::sleep_for(backoff.next());
    }
}

std::size_t ArenaPool::acquire(const void* borrower, const Deadline& deadline) {
    Backoff backoff;
    std::unique_lock lock(mutex_);
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
        const auto until = in_flight
                               ? std::min(deadline.at(),
                                          std::chrono::steady_clock::now() + backoff.next())
                               : deadline.at();
        returned_.wait_until(lock, until);
    }
}

void ArenaPool::require_lent(std::size_t index, const void* borrower) const {
    const std::lock_guard lock(mutex_);
    if (index >= slots_.size() || slots_[index].borrower != borrower) {
        fail(SPARKCACHE_INVALID_STATE,
             "arena %zu is not lent to this transaction; acquire one and use it once", index);
    }
}

void ArenaPool::give_back(std::size_t index, std::shared_ptr<Work> work) {
    {
        const std::lock_guard lock(mutex_);
        slots_[index] = {nullptr, std::move(work)};
    }
    returned_.notify_one();
}

void ArenaPool::give_back_all(const void* borrower) {
    {
        const std::lock_guard lock(mutex_);
        for (Slot& slot : slots_) {
            if (slot.borrower == borrower) {
                slot = {};
            }
        }
    }
    returned_.notify_all();
}

}  // namespace sparkcache
