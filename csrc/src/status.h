// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>

#include "sparkcache_placement.h"

namespace sparkcache {

/// A refusal or a failure: the status that crosses the ABI, and a bounded message.
class Error : public std::exception {
public:
    Error(sparkcache_status status, const char* message) noexcept;

    [[nodiscard]] sparkcache_status status() const noexcept { return status_; }
    [[nodiscard]] const char* what() const noexcept override { return message_; }

private:
    sparkcache_status status_;
    char message_[SPARKCACHE_MESSAGE_BYTES];
};

/// Throw an Error whose message is formatted as by printf and cut to its bound.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(sparkcache_status status,
                                                             const char* format, ...);

/// `a + b` and `a * b`, or Error(INVALID_ARGUMENT) naming `what` if the result has no uint64_t.
std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, const char* what);
std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b, const char* what);

}  // namespace sparkcache
