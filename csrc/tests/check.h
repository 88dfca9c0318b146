// SPDX-License-Identifier: Apache-2.0
//
// As much of a test framework as these tests need, and no more of the C++ runtime than the library.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "sparkcache_placement.h"

namespace check {

struct Test {
    const char* name;
    void (*body)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Register {
    Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

/// This thread's last error, until it asks again.
inline std::string_view last_error() {
    static thread_local char message[SPARKCACHE_MESSAGE_BYTES];
    sparkcache_last_error(message, sizeof message);
    return message;
}

[[noreturn]] inline void failed(const char* file, int line, const char* what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
    std::exit(1);
}

[[noreturn]] inline void failed_status(const char* file, int line, const char* call,
                                       sparkcache_status found, sparkcache_status expected) {
    std::fprintf(stderr, "%s:%d: %s is %s, expected %s: %s\n", file, line, call,
                 sparkcache_status_name(found), sparkcache_status_name(expected),
                 last_error().data());
    std::exit(1);
}

/// Repeatable pseudo-random numbers (splitmix64).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
        return z ^ (z >> 31);
    }
    /// Between 0 and `bound` - 1.
    std::uint64_t below(std::uint64_t bound) { return next() % bound; }
    void fill(std::vector<std::uint8_t>& bytes) {
        for (std::uint8_t& byte : bytes) {
            byte = static_cast<std::uint8_t>(next());
        }
    }

private:
    std::uint64_t state_;
};

}  // namespace check

#define TEST(name)                                                  \
    static void test_##name();                                      \
    static const check::Register register_##name(#name, test_##name); \
    static void test_##name()

#define CHECK(condition)                                                  \
    do {                                                                  \
        if (!(condition)) {                                               \
            check::failed(__FILE__, __LINE__, "CHECK(" #condition ")");    \
        }                                                                 \
    } while (false)

#define CHECK_STATUS(call, expected)                                                       \
    do {                                                                                   \
        const sparkcache_status check_status = (call);                                     \
        if (check_status != (expected)) {                                                  \
            check::failed_status(__FILE__, __LINE__, #call, check_status, expected);        \
        }                                                                                  \
    } while (false)

#define CHECK_OK(call) CHECK_STATUS(call, SPARKCACHE_OK)
