// SPDX-License-Identifier: Apache-2.0
//
// The kernel bodies, run on the host lane by lane and with a thread per lane.
#include <cstring>
#include <vector>

#include "../kernels/tiles.h"
#include "../src/sync.h"
#include "check.h"

using namespace sparkcache;

namespace {

constexpr std::uint64_t kArena = 1 << 17;

struct Case {
    std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(1 << 18);
    std::vector<std::uint8_t> arena = std::vector<std::uint8_t>(kArena);
    std::vector<Tile> tiles;
    std::vector<std::uint8_t> expected;  ///< of what is written: memory or arena
};

/// Tiles of every alignment and odd lengths that touch no byte twice on either side.
Case make_case(std::uint64_t seed, bool gather) {
    check::Random random(seed);
    Case made;
    random.fill(made.memory);
    random.fill(made.arena);
    made.expected = gather ? made.arena : made.memory;
    std::uint64_t page = 0;
    std::uint64_t at = 0;
    while (made.tiles.size() < 40) {
        page += random.below(40);
        at += random.below(40);
        const bool large = random.below(4) == 0;
        const std::uint64_t length = 1 + random.below(large ? kTileBytes : 300);
        if (page + length > made.memory.size() || at + length > kArena) {
            break;
        }
        const bool zero = gather && random.below(5) == 0;
        std::uint8_t* const place = made.memory.data() + page;
        made.tiles.push_back({zero ? 0 : reinterpret_cast<std::uintptr_t>(place), at,
                              static_cast<std::uint32_t>(length), 0});
        if (!gather) {
            std::memcpy(made.expected.data() + page, made.arena.data() + at, length);
        } else if (zero) {
            std::memset(made.expected.data() + at, 0, length);
        } else {
            std::memcpy(made.expected.data() + at, place, length);
        }
        page += length;
        at += length;
    }
    return made;
}

void run_lane(Case& c, bool gather, std::uint32_t* error, std::uint32_t block,
              std::uint32_t blocks, std::uint32_t lane, std::uint32_t lanes) {
    if (gather) {
        move_tiles<true>(c.tiles.data(), c.tiles.size(), c.arena.data(), kArena, error, block,
                         blocks, lane, lanes);
    } else {
        move_tiles<false>(c.tiles.data(), c.tiles.size(), c.arena.data(), kArena, error, block,
                          blocks, lane, lanes);
    }
}

void check_case(const Case& c, bool gather, std::uint32_t error) {
    CHECK(error == kTileOk);
    CHECK((gather ? c.arena : c.memory) == c.expected);
}

}  // namespace

TEST(kernels_move_every_alignment_and_length) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        const bool gather = seed % 2 == 0;
        Case c = make_case(seed, gather);
        std::uint32_t error = kTileOk;
        for (std::uint32_t block = 0; block < 3; ++block) {
            for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
                run_lane(c, gather, &error, block, 3, lane, kLanes);
            }
        }
        check_case(c, gather, error);
    }
}

// A thread per lane, so that the thread sanitizer sees two lanes or blocks that write one byte.
// Sixteen are the fewest that the unaligned ends of a vector move allow.
TEST(kernels_lanes_write_disjoint_bytes) {
    for (std::uint64_t seed = 100; seed < 106; ++seed) {
        const bool gather = seed % 2 == 0;
        Case c = make_case(seed, gather);
        std::uint32_t error = kTileOk;
        constexpr std::uint32_t kBlocks = 2;
        constexpr std::uint32_t kThreads = 16;
        std::vector<sparkcache::Thread> threads;
        for (std::uint32_t block = 0; block < kBlocks; ++block) {
            for (std::uint32_t lane = 0; lane < kThreads; ++lane) {
                threads.emplace_back([&c, &error, gather, block, lane] {
                    run_lane(c, gather, &error, block, kBlocks, lane, kThreads);
                });
            }
        }
        threads.clear();  // joins them
        check_case(c, gather, error);
    }
}

TEST(kernels_refuse_damaged_tiles_and_carry_out_the_others) {
    const struct {
        std::uint64_t arena;
        std::uint32_t length;
        std::uint32_t problem;
    } damages[] = {
        {0, 0, kTileLength},
        {0, kTileBytes + 1, kTileLength},
        {kArena, 1, kTileBounds},
        {kArena - 1, 2, kTileBounds},
        {UINT64_MAX, 2, kTileBounds},
    };
    for (const auto& damage : damages) {
        for (const bool gather : {false, true}) {
            Case c = make_case(7, gather);
            c.tiles.insert(c.tiles.begin() + 3,
                           {reinterpret_cast<std::uintptr_t>(c.memory.data()), damage.arena,
                            damage.length, 0});
            std::uint32_t error = kTileOk;
            for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
                run_lane(c, gather, &error, 0, 1, lane, kLanes);
            }
            CHECK(error == damage.problem);
            CHECK((gather ? c.arena : c.memory) == c.expected);
        }
    }
}
