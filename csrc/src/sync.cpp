// SPDX-License-Identifier: Apache-2.0
#include "sync.h"

#include <unistd.h>

#include <cstring>
#include <ctime>

#include "status.h"

namespace sparkcache {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

timespec timespec_of(std::uint64_t nanoseconds) noexcept {
    timespec time{};
    time.tv_sec = static_cast<std::time_t>(nanoseconds / kSecond);
    time.tv_nsec = static_cast<long>(nanoseconds % kSecond);
    return time;
}

}  // namespace

std::uint64_t now_ns() noexcept {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * kSecond +
           static_cast<std::uint64_t>(time.tv_nsec);
}

void sleep_ns(std::uint64_t duration) noexcept {
    const timespec time = timespec_of(duration);
    ::nanosleep(&time, nullptr);  // a signal may end it early: whoever sleeps looks again anyway
}

unsigned processors() noexcept {
    const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
    return online > 1 ? static_cast<unsigned>(online) : 1;
}

Condition::Condition() {
    pthread_condattr_t attributes;
    int problem = ::pthread_condattr_init(&attributes);
    if (problem == 0) {
        ::pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        problem = ::pthread_cond_init(&condition_, &attributes);
        ::pthread_condattr_destroy(&attributes);
    }
    if (problem != 0) {
        fail(SPARKCACHE_NO_MEMORY, "a condition variable: %s", std::strerror(problem));
    }
}

void Condition::wait_until(Mutex& mutex, std::uint64_t deadline_ns) noexcept {
    const timespec deadline = timespec_of(deadline_ns);
    ::pthread_cond_timedwait(&condition_, &mutex.mutex_, &deadline);
}

void Thread::start(void* (*body)(void*), void* argument) {
    if (const int problem = ::pthread_create(&thread_, nullptr, body, argument); problem != 0) {
        fail(SPARKCACHE_NO_MEMORY, "a thread: %s", std::strerror(problem));
    }
    running_ = true;
}

Thread::~Thread() {
    if (running_) {
        ::pthread_join(thread_, nullptr);
    }
}

}  // namespace sparkcache
