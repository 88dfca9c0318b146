// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace sparkcache {

/// As memcpy, past the caches where the processor can: for bytes that are too many to stay in
/// them. The C library does so for one large copy; a large job in small pieces it cannot know.
/// Call stream_fence() before another thread may look at what was written.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes);

/// Ask early for memory that will be streamed after what is copied now. Pages lie anywhere, so
/// neither the processor's prefetcher nor its address translation expects the next one.
void expect_read(const std::byte* from, std::size_t bytes);
void expect_write(const std::byte* to);

/// Order streamed bytes before everything that this thread does next.
void stream_fence();

}  // namespace sparkcache
