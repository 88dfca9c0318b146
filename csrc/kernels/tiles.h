// SPDX-License-Identifier: Apache-2.0
//
// The inner loop of the kernels. It knows no CUDA: `lane` of `lanes` is a thread of a block on a
// device and a loop index or a std::thread in the tests, which run this very code under
// sanitizers.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define SPARKCACHE_KERNEL __device__ __forceinline__
#define SPARKCACHE_UNROLL _Pragma("unroll")
#else
#define SPARKCACHE_KERNEL inline
#define SPARKCACHE_UNROLL
#endif

namespace sparkcache {

/// A copy that one block of threads makes: at most kTileBytes between a page and the arena.
struct Tile {
    uint64_t page;    ///< address in the engine's memory; 0: the arena gets zeros
    uint64_t arena;   ///< offset in the arena
    uint32_t length;
    uint32_t reserved;
};
static_assert(sizeof(Tile) == 24, "shared by host and device");

/// Threads of a block.
constexpr uint32_t kLanes = 256;
/// 32 KiB are eight 16-byte vectors per thread: two rounds of four loads in flight. Larger tiles
/// leave the last wave of blocks ragged, smaller ones pay for reading their descriptor.
constexpr uint32_t kTileBytes = 32768;
/// Loads that a thread has in flight before its first store.
constexpr int kInFlight = 4;

/// Written to the error word; the first bad tile that a lane sees stops nothing but itself.
enum TileError : uint32_t { kTileOk = 0, kTileLength = 1, kTileBounds = 2 };

#if defined(__CUDACC__)
#define SPARKCACHE_ALIAS
#else
#define SPARKCACHE_ALIAS __attribute__((may_alias))
#endif

/// What one thread moves at a time: 16 bytes are the widest load and store that there is.
struct SPARKCACHE_ALIAS Vector16 {
    alignas(16) uint32_t x;
    uint32_t y, z, w;
};
typedef uint64_t SPARKCACHE_ALIAS Word8;
typedef uint32_t SPARKCACHE_ALIAS Word4;
typedef uint16_t SPARKCACHE_ALIAS Word2;
typedef uint8_t SPARKCACHE_ALIAS Word1;

template <typename Word>
SPARKCACHE_KERNEL Word zero_word() {
    return Word{};
}

/// Copy `count` words, or zeros, in strides of `lanes`, kInFlight loads ahead of the stores.
template <typename Word, bool kZero>
SPARKCACHE_KERNEL void move_words(uint8_t* to, const uint8_t* from, uint32_t count, uint32_t lane,
                                  uint32_t lanes) {
    Word* const out = reinterpret_cast<Word*>(to);
    const Word* const in = reinterpret_cast<const Word*>(from);
    uint32_t i = lane;
    const uint32_t step = lanes * kInFlight;
    const uint32_t whole = count / step * step;  // the same for all lanes: no divergence
    for (; i < whole; i += step) {
        Word held[kInFlight];
        SPARKCACHE_UNROLL
        for (int k = 0; k < kInFlight; ++k) {
            held[k] = kZero ? zero_word<Word>() : in[i + static_cast<uint32_t>(k) * lanes];
        }
        SPARKCACHE_UNROLL
        for (int k = 0; k < kInFlight; ++k) {
            out[i + static_cast<uint32_t>(k) * lanes] = held[k];
        }
    }
    for (; i < count; i += lanes) {
        out[i] = kZero ? zero_word<Word>() : in[i];
    }
}

/// Copy `length` bytes whose ends need not be aligned: single bytes up to the first boundary of
/// Word in both, words, single bytes again.
template <typename Word, bool kZero>
SPARKCACHE_KERNEL void move_aligned(uint8_t* to, const uint8_t* from, uint32_t length,
                                    uint32_t lane, uint32_t lanes) {
    const uint32_t width = static_cast<uint32_t>(sizeof(Word));
    const uint32_t misaligned = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to)) & (width - 1);
    uint32_t head = (width - misaligned) & (width - 1);
    if (head > length) {
        head = length;
    }
    const uint32_t words = (length - head) / width;
    const uint32_t tail_at = head + words * width;
    if (lane < head) {
        to[lane] = kZero ? uint8_t{0} : from[lane];
    }
    move_words<Word, kZero>(to + head, kZero ? from : from + head, words, lane, lanes);
    if (lane < length - tail_at) {
        to[tail_at + lane] = kZero ? uint8_t{0} : from[tail_at + lane];
    }
}

/// Copy with the widest words to which both addresses can be aligned at once.
SPARKCACHE_KERNEL void move_bytes(uint8_t* to, const uint8_t* from, uint32_t length, uint32_t lane,
                                  uint32_t lanes) {
    const uint32_t phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) ^
                                                 reinterpret_cast<uintptr_t>(from));
    if ((phase & 15u) == 0) {
        move_aligned<Vector16, false>(to, from, length, lane, lanes);
    } else if ((phase & 7u) == 0) {
        move_aligned<Word8, false>(to, from, length, lane, lanes);
    } else if ((phase & 3u) == 0) {
        move_aligned<Word4, false>(to, from, length, lane, lanes);
    } else if ((phase & 1u) == 0) {
        move_aligned<Word2, false>(to, from, length, lane, lanes);
    } else {
        move_words<Word1, false>(to, from, length, lane, lanes);
    }
}

/// Whether a tile may be carried out. The host has checked every span; this guards the device
/// against descriptors that were damaged on their way.
SPARKCACHE_KERNEL uint32_t check_tile(const Tile& tile, uint64_t arena_bytes) {
    if (tile.length == 0 || tile.length > kTileBytes) {
        return kTileLength;
    }
    if (tile.arena > arena_bytes || tile.length > arena_bytes - tile.arena) {
        return kTileBounds;
    }
    return kTileOk;
}

/// What one lane of block `block` of `blocks` does: tiles block, block + blocks, …
/// `kGather`: pages to arena, else arena to pages.
template <bool kGather>
SPARKCACHE_KERNEL void move_tiles(const Tile* tiles, uint64_t count, uint8_t* arena,
                                  uint64_t arena_bytes, volatile uint32_t* error, uint32_t block,
                                  uint32_t blocks, uint32_t lane, uint32_t lanes) {
    for (uint64_t t = block; t < count; t += blocks) {
        const Tile tile = tiles[t];
        const uint32_t problem = check_tile(tile, arena_bytes);
        if (problem != kTileOk) {
            if (lane == 0) {
                *error = problem;
            }
            continue;
        }
        uint8_t* const at = arena + tile.arena;
        uint8_t* const page = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(tile.page));
        if (!kGather) {
            move_bytes(page, at, tile.length, lane, lanes);
        } else if (tile.page != 0) {
            move_bytes(at, page, tile.length, lane, lanes);
        } else {
            move_aligned<Vector16, true>(at, nullptr, tile.length, lane, lanes);
        }
    }
}

}  // namespace sparkcache
