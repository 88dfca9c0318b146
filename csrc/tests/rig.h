// SPDX-License-Identifier: Apache-2.0
//
// A small engine's memory: two groups over each other in one slab per layer, as vLLM lays hybrid
// models out, with padding that must stay as it is.
#pragma once

#include <cstring>
#include <vector>

#include "check.h"
#include "sparkcache_placement.h"

namespace check {

struct Rig {
    static constexpr std::uint64_t kBlocks = 12;
    static constexpr std::uint64_t kStride = 3000;
    static constexpr std::uint64_t kHeads = 3;
    static constexpr std::uint64_t kPositions = 16;
    static constexpr std::uint64_t kPositionBytes = 61;
    static constexpr std::uint64_t kState = 2500;
    static constexpr std::uint64_t kAttentionPage = 2 * kHeads * kPositions * kPositionBytes;
    static constexpr std::uint64_t kStatePage = kState;

    std::vector<std::vector<std::uint8_t>> slabs;
    std::vector<sparkcache_layer> layers;
    std::vector<sparkcache_extent> extents;

    explicit Rig(std::uint64_t seed) {
        Random random(seed);
        for (int i = 0; i < 2; ++i) {
            slabs.emplace_back(kBlocks * kStride);
            random.fill(slabs.back());
        }
        constexpr std::uint64_t row = kPositions * kPositionBytes;
        extents = {{8, kPositions, kPositionBytes, 0, kHeads, row + 7}, {0, 1, kState, 0, 1, 0}};
        layers = {layer(0, 0, 0), layer(1, 0, 0), layer(0, 1, 1)};
    }

    [[nodiscard]] sparkcache_layer layer(std::size_t slab, std::uint64_t extent,
                                         std::uint32_t group) const {
        return {reinterpret_cast<std::uintptr_t>(slabs[slab].data()),
                slabs[slab].size(),
                0,
                kStride,
                kBlocks,
                extent,
                1,
                group,
                0};
    }

    [[nodiscard]] static std::uint64_t page_bytes(std::uint32_t group) {
        return group == 0 ? kAttentionPage : kStatePage;
    }

    /// The page's bytes, in place, in encoded order.
    std::vector<std::uint8_t*> page(std::uint32_t group, std::uint64_t block) {
        std::vector<std::uint8_t*> found;
        if (group == 1) {
            for (std::uint64_t i = 0; i < kState; ++i) {
                found.push_back(&slabs[0][block * kStride + i]);
            }
            return found;
        }
        constexpr std::uint64_t row = kPositions * kPositionBytes;
        for (auto& slab : slabs) {
            for (std::uint64_t head = 0; head < kHeads; ++head) {
                for (std::uint64_t i = 0; i < row; ++i) {
                    found.push_back(&slab[block * kStride + 8 + head * (row + 7) + i]);
                }
            }
        }
        return found;
    }

    std::vector<std::uint8_t> read(std::uint32_t group, std::uint64_t block) {
        std::vector<std::uint8_t> found;
        for (const std::uint8_t* byte : page(group, block)) {
            found.push_back(*byte);
        }
        return found;
    }

    sparkcache_placement* open(sparkcache_config config) {
        sparkcache_placement* placement = nullptr;
        CHECK_OK(sparkcache_create(&config, &placement));
        CHECK_OK(describe(placement));
        return placement;
    }

    sparkcache_status describe(sparkcache_placement* placement) const {
        return sparkcache_describe(placement, layers.data(), layers.size(), extents.data(),
                                   extents.size());
    }
};

inline sparkcache_config host_config() {
    sparkcache_config config{};
    config.abi_version = SPARKCACHE_PLACEMENT_ABI;
    config.arena_bytes = 1 << 16;
    config.arena_count = 2;
    config.host_threads = 2;
    return config;
}

inline sparkcache_page whole(std::uint32_t group, std::uint64_t block) {
    return {block, SPARKCACHE_ALL_POSITIONS, group, 0};
}

inline std::uint8_t* bytes_of(const sparkcache_arena& arena) {
    return reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(arena.address));
}

constexpr std::uint64_t kSecond = 1'000'000'000;

}  // namespace check
