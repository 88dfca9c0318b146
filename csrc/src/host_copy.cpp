// SPDX-License-Identifier: Apache-2.0
#include "host_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparkcache {
namespace {

constexpr std::size_t kLine = 64;
/// How far ahead to ask for source lines: some latency at some GB/s.
constexpr std::size_t kAhead = 8 * kLine;

}  // namespace

void expect_read(const std::byte* from, std::size_t bytes) {
    for (std::size_t at = 0; at < std::min(bytes, kAhead); at += kLine) {
        __builtin_prefetch(from + at, 0, 0);
    }
}

void expect_write(const std::byte* to) {
    // One line: what is streamed over is not read, only its translation is waited for.
    __builtin_prefetch(to, 0, 3);
}

#if defined(__SSE2__)

namespace {

/// Below this the unaligned ends weigh more than what is saved.
constexpr std::size_t kWorthStreaming = 512;

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes < kWorthStreaming) {
        std::memcpy(to, from, bytes);
        return;
    }
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) & (kLine - 1);
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(from + (bytes > kAhead ? kAhead : 0)),
                     _MM_HINT_NTA);
        const auto* const in = reinterpret_cast<const __m128i*>(from);
        auto* const out = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(in);
        const __m128i b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2);
        const __m128i d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    std::memcpy(to, from, bytes);
}

void stream_fence() {
    _mm_sfence();
}

#else

void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
}

void stream_fence() {}

#endif

}  // namespace sparkcache
