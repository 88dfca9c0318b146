// SPDX-License-Identifier: Apache-2.0
//
// Mutexes, conditions, threads and the clock, straight on POSIX. The standard library's would
// bring most of a C++ runtime into the library, and their timed waits follow the wall clock on
// the C library that we support.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace sparkcache {

/// Nanoseconds of the monotonic clock.
[[nodiscard]] std::uint64_t now_ns() noexcept;
void sleep_ns(std::uint64_t duration) noexcept;
/// Processors that are online; at least 1.
[[nodiscard]] unsigned processors() noexcept;

class Mutex {
public:
    Mutex() = default;
    ~Mutex() { ::pthread_mutex_destroy(&mutex_); }
    Mutex(const Mutex&) = delete;
    Mutex& operator=(const Mutex&) = delete;

    void lock() noexcept { ::pthread_mutex_lock(&mutex_); }
    void unlock() noexcept { ::pthread_mutex_unlock(&mutex_); }
    [[nodiscard]] bool try_lock() noexcept { return ::pthread_mutex_trylock(&mutex_) == 0; }

private:
    friend class Condition;
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

/// Holds a mutex for a scope.
class Lock {
public:
    explicit Lock(Mutex& mutex) noexcept : mutex_(mutex) { mutex_.lock(); }
    ~Lock() { mutex_.unlock(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

private:
    Mutex& mutex_;
};

/// Holds a mutex for a scope, if it is wanted and nobody else has it.
class TryLock {
public:
    TryLock(Mutex& mutex, bool wanted) noexcept
        : mutex_(mutex), held_(wanted && mutex.try_lock()) {}
    ~TryLock() {
        if (held_) {
            mutex_.unlock();
        }
    }
    TryLock(const TryLock&) = delete;
    TryLock& operator=(const TryLock&) = delete;

    [[nodiscard]] bool held() const noexcept { return held_; }

private:
    Mutex& mutex_;
    const bool held_;
};

/// A condition of what a mutex guards. Waits may end early, as POSIX allows: look again.
class Condition {
public:
    Condition();
    ~Condition() { ::pthread_cond_destroy(&condition_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;

    /// The caller holds `mutex`, and does so again on return.
    void wait(Mutex& mutex) noexcept { ::pthread_cond_wait(&condition_, &mutex.mutex_); }
    /// Give up when the monotonic clock has come to `deadline_ns`.
    void wait_until(Mutex& mutex, std::uint64_t deadline_ns) noexcept;
    void notify_one() noexcept { ::pthread_cond_signal(&condition_); }
    void notify_all() noexcept { ::pthread_cond_broadcast(&condition_); }

private:
    pthread_cond_t condition_;
};

/// A thread that is joined when the object dies. No exception may leave its body.
class Thread {
public:
    /// Throws NO_MEMORY where the system has no thread to give.
    template <typename Body>
    explicit Thread(Body body) {
        auto owned = std::make_unique<Body>(std::move(body));
        start(
            [](void* argument) -> void* {
                const std::unique_ptr<Body> mine(static_cast<Body*>(argument));
                (*mine)();
                return nullptr;
            },
            owned.get());
        static_cast<void>(owned.release());
    }
    ~Thread();
    Thread(Thread&& other) noexcept
        : thread_(other.thread_), running_(std::exchange(other.running_, false)) {}
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;
    Thread& operator=(Thread&&) = delete;

private:
    void start(void* (*body)(void*), void* argument);

    pthread_t thread_{};
    bool running_ = false;
};

}  // namespace sparkcache
