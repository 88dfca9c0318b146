// SPDX-License-Identifier: Apache-2.0
#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace sparkcache {

Error::Error(sparkcache_status status, const char* message) noexcept : status_(status) {
    std::snprintf(message_, sizeof message_, "%s", message);
}

void fail(sparkcache_status status, const char* format, ...) {
    char message[SPARKCACHE_MESSAGE_BYTES];
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw Error(status, message);
}

std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, const char* what) {
    std::uint64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "%s: %llu + %llu passes 64 bits", what,
             static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
    }
    return sum;
}

std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b, const char* what) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "%s: %llu * %llu passes 64 bits", what,
             static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
    }
    return product;
}

}  // namespace sparkcache
