// SPDX-License-Identifier: Apache-2.0
//
// Launch shape. A page move is a copy: it is done when memory bandwidth is used up, and that takes
// enough bytes in flight. 256 threads hold four 16-byte vectors each, 16 KiB per block; six
// blocks per multiprocessor keep some 13 MB in flight on 132 multiprocessors, three times
// bandwidth × latency of HBM3e (4.8 TB/s × 0.8 us = 3.8 MB). Six are what the 40 registers of a
// thread allow; forcing eight spills. Tiles are dealt round robin, so that the grid need not
// match the work and a launch of a few tiles occupies a few blocks.
#include "tiles.h"

namespace {

using sparkcache::kLanes;
using sparkcache::Tile;

}  // namespace

// The names carry the version of the arguments: a library never launches a stranger's kernel.
extern "C" __global__ void __launch_bounds__(kLanes, 6)
    sparkcache_scatter_v1(const Tile* tiles, unsigned long long count, unsigned char* arena,
                          unsigned long long arena_bytes, volatile unsigned* error) {
    sparkcache::move_tiles<false>(tiles, count, arena, arena_bytes, error, blockIdx.x, gridDim.x,
                                  threadIdx.x, blockDim.x);
}

extern "C" __global__ void __launch_bounds__(kLanes, 6)
    sparkcache_gather_v1(const Tile* tiles, unsigned long long count, unsigned char* arena,
                         unsigned long long arena_bytes, volatile unsigned* error) {
    sparkcache::move_tiles<true>(tiles, count, arena, arena_bytes, error, blockIdx.x, gridDim.x,
                                 threadIdx.x, blockDim.x);
}
