// SPDX-License-Identifier: Apache-2.0
//
// As much of a test framework as these tests need.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "sparkcache_placement.h"

namespace check {

struct Test {
    const char* name;
    std::function<void()> body;
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Register {
    Register(const char* name, std::function<void()> body) {
        tests().push_back({name, std::move(body)});
    }
};

inline std::string last_error() {
    char message[SPARKCACHE_MESSAGE_BYTES];
    sparkcache_last_error(message, sizeof message);
    return message;
}

[[noreturn]] inline void failed(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
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
            check::failed(__FILE__, __LINE__,                                              \
                          std::string(#call) + " is " +                                    \
                              sparkcache_status_name(check_status) + ", expected " +       \
                              sparkcache_status_name(expected) + ": " + check::last_error()); \
        }                                                                                  \
    } while (false)

#define CHECK_OK(call) CHECK_STATUS(call, SPARKCACHE_OK)
