// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <string_view>

#include "../src/sync.h"
#include "rig.h"

using namespace check;

namespace {

struct Closer {
    sparkcache_placement* placement;
    ~Closer() { CHECK_OK(sparkcache_destroy(placement)); }
};

void restore_blocks(sparkcache_placement* placement, Rig& rig, std::uint64_t first,
                    std::uint64_t last, std::uint8_t value) {
    std::vector<sparkcache_sealed_page> pages;
    for (std::uint64_t block = first; block < last; ++block) {
        pages.push_back({block, static_cast<std::uint32_t>(block % 2), 0, {value}});
    }
    sparkcache_restore* restore = nullptr;
    CHECK_OK(sparkcache_restore_begin(placement, pages.data(), pages.size(), nullptr, &restore));
    for (std::uint64_t i = 0; i < pages.size(); ++i) {
        sparkcache_arena arena{};
        CHECK_OK(sparkcache_restore_acquire(restore, 60 * kSecond, &arena));
        std::fill_n(bytes_of(arena), Rig::page_bytes(pages[i].group), value);
        const sparkcache_verified_page verified{i, 0, {value}};
        CHECK_OK(sparkcache_restore_submit(restore, arena.index, &verified, 1));
    }
    CHECK_OK(sparkcache_restore_finish(restore, kSecond));
    CHECK_OK(sparkcache_restore_destroy(restore));
    for (const auto& page : pages) {
        for (const std::uint8_t byte : rig.read(page.group, page.block)) {
            CHECK(byte == value);
        }
    }
}

void capture_block(sparkcache_placement* placement, Rig& rig, std::uint64_t block) {
    const auto group = static_cast<std::uint32_t>(block % 2);
    const sparkcache_page page = whole(group, block);
    sparkcache_capture* capture = nullptr;
    CHECK_OK(sparkcache_capture_begin(placement, &page, 1, nullptr, &capture));
    sparkcache_arena arena{};
    CHECK_OK(sparkcache_capture_acquire(capture, 60 * kSecond, &arena));
    const sparkcache_span span{0, 0, 11, Rig::page_bytes(group)};
    CHECK_OK(sparkcache_capture_submit(capture, arena.index, &span, 1));
    CHECK_OK(sparkcache_capture_wait(capture, arena.index, kSecond));
    const std::vector<std::uint8_t> expected = rig.read(group, block);
    CHECK(std::equal(expected.begin(), expected.end(), bytes_of(arena) + 11));
    CHECK_OK(sparkcache_capture_release(capture, arena.index));
    CHECK_OK(sparkcache_capture_finish(capture, kSecond));
    CHECK_OK(sparkcache_capture_destroy(capture));
}

}  // namespace

TEST(host_transactions_in_parallel_share_two_arenas) {
    Rig rig(1);
    sparkcache_placement* const placement = rig.open(host_config());
    const Closer closer{placement};
    std::vector<sparkcache::Thread> threads;
    for (std::uint64_t t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
            for (int round = 0; round < 20; ++round) {
                restore_blocks(placement, rig, 1 + 3 * t, 4 + 3 * t,
                               static_cast<std::uint8_t>(round + 100 * static_cast<int>(t)));
            }
        });
        threads.emplace_back([&, t] {
            for (int round = 0; round < 60; ++round) {
                capture_block(placement, rig, 8 + t);
            }
        });
    }
    threads.clear();  // joins them
    sparkcache_stats stats{};
    CHECK_OK(sparkcache_get_stats(placement, &stats));
    CHECK(stats.transactions_finished == 160);
    CHECK(stats.transactions_open == 0);
    CHECK(stats.pages_restored == 120);
    CHECK(stats.pages_captured == 120);
}

// Copies above a megabyte are shared between threads: every byte still exactly once.
TEST(host_large_copies_are_shared_and_exact) {
    Random random(5);
    constexpr std::uint64_t kBlocks = 9;
    constexpr std::uint64_t kPage = 777'777;
    std::vector<std::uint8_t> memory(kBlocks * (kPage + 5));
    random.fill(memory);
    const std::vector<std::uint8_t> before = memory;
    const sparkcache_extent extent{2, 1, kPage, 0, 1, 0};
    const sparkcache_layer layer{reinterpret_cast<std::uintptr_t>(memory.data()),
                                 memory.size(), 0, kPage + 5, kBlocks, 0, 1, 0, 0};
    sparkcache_config config = host_config();
    config.host_threads = 4;
    config.arena_bytes = 8 << 20;
    sparkcache_placement* placement = nullptr;
    CHECK_OK(sparkcache_create(&config, &placement));
    const Closer closer{placement};
    CHECK_OK(sparkcache_describe(placement, &layer, 1, &extent, 1));

    std::vector<sparkcache::Thread> threads;
    std::atomic<std::uint64_t> wrong{0};
    for (std::uint64_t half = 0; half < 2; ++half) {
        threads.emplace_back([&, half] {
            std::vector<sparkcache_page> pages;
            std::vector<sparkcache_span> spans;
            for (std::uint64_t i = 0; i < 4; ++i) {
                pages.push_back(whole(0, 1 + half * 4 + i));
                spans.push_back({i, 0, i * kPage, kPage});
            }
            std::vector<std::uint8_t> source(4 * kPage);
            Random own(half);
            for (int round = 0; round < 4; ++round) {
                own.fill(source);
                sparkcache_placing* placing = nullptr;
                CHECK_OK(sparkcache_placing_begin(placement, pages.data(), 4, nullptr, &placing));
                CHECK_OK(sparkcache_placing_submit(placing, source.data(), source.size(),
                                                   spans.data(), 4, kSecond));
                CHECK_OK(sparkcache_placing_finish(placing, kSecond));
                CHECK_OK(sparkcache_placing_destroy(placing));
                sparkcache_capture* capture = nullptr;
                CHECK_OK(sparkcache_capture_begin(placement, pages.data(), 4, nullptr, &capture));
                sparkcache_arena arena{};
                CHECK_OK(sparkcache_capture_acquire(capture, 60 * kSecond, &arena));
                CHECK_OK(sparkcache_capture_submit(capture, arena.index, spans.data(), 4));
                CHECK_OK(sparkcache_capture_wait(capture, arena.index, kSecond));
                wrong += std::equal(source.begin(), source.end(), bytes_of(arena)) ? 0u : 1u;
                CHECK_OK(sparkcache_capture_finish(capture, kSecond));
                CHECK_OK(sparkcache_capture_destroy(capture));
            }
        });
    }
    threads.clear();  // joins them
    CHECK(wrong == 0);
    // Block 0 and the padding around every page are as they were.
    for (std::uint64_t i = 0; i < memory.size(); ++i) {
        const std::uint64_t at = i % (kPage + 5);
        if (i < kPage + 5 || at < 2 || at >= kPage + 2) {
            CHECK(memory[i] == before[i]);
        }
    }
}

TEST(host_groups_that_overlay_each_other_are_told_apart_by_block) {
    Rig rig(3);
    sparkcache_placement* const placement = rig.open(host_config());
    const Closer closer{placement};
    sparkcache_placing* placing = nullptr;
    const sparkcache_page apart[] = {whole(0, 3), whole(1, 4)};
    CHECK_OK(sparkcache_placing_begin(placement, apart, 2, nullptr, &placing));
    CHECK_OK(sparkcache_placing_abort(placing, kSecond));
    CHECK_OK(sparkcache_placing_destroy(placing));
    const sparkcache_page same[] = {whole(0, 3), whole(1, 3)};
    CHECK_STATUS(sparkcache_placing_begin(placement, same, 2, nullptr, &placing),
                 SPARKCACHE_COVERAGE);
}

TEST(abi_refuses_what_cannot_be) {
    sparkcache_abi_info info{};
    CHECK_OK(sparkcache_query(SPARKCACHE_PLACEMENT_ABI, &info));
    CHECK_STATUS(sparkcache_query(2, &info), SPARKCACHE_UNSUPPORTED);
    CHECK(info.abi_version == SPARKCACHE_PLACEMENT_ABI);
    CHECK_STATUS(sparkcache_query(1, nullptr), SPARKCACHE_INVALID_ARGUMENT);

    sparkcache_placement* placement = nullptr;
    CHECK_STATUS(sparkcache_create(nullptr, &placement), SPARKCACHE_INVALID_ARGUMENT);
    const auto refused = [&](auto change, sparkcache_status status) {
        sparkcache_config config = host_config();
        change(config);
        CHECK_STATUS(sparkcache_create(&config, &placement), status);
        CHECK(placement == nullptr);
    };
    refused([](auto& c) { c.abi_version = 0; }, SPARKCACHE_UNSUPPORTED);
    refused([](auto& c) { c.backend = 2; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.arena_bytes = 0; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.arena_bytes = 4097; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.arena_bytes = UINT64_MAX - 4095; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.arena_bytes = std::uint64_t{1} << 60; }, SPARKCACHE_NO_MEMORY);
    refused([](auto& c) { c.arena_count = 0; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.arena_count = 65; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.host_threads = 65; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.device = 1; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.transfer = 3; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.reserved[1] = 1; }, SPARKCACHE_INVALID_ARGUMENT);

    char tiny[4];
    CHECK(sparkcache_last_error(tiny, sizeof tiny) > 3);
    CHECK(tiny[3] == '\0');
    CHECK(std::string_view(sparkcache_status_name(77)) == "an unknown status");
}

TEST(abi_refuses_layouts_that_cannot_be) {
    const auto refused = [](auto change) {
        Rig rig(4);
        change(rig);
        sparkcache_placement* placement = nullptr;
        const sparkcache_config config = host_config();
        CHECK_OK(sparkcache_create(&config, &placement));
        CHECK_STATUS(rig.describe(placement), SPARKCACHE_INVALID_ARGUMENT);
        CHECK_OK(sparkcache_destroy(placement));
    };
    refused([](Rig& r) { r.layers.clear(); });
    refused([](Rig& r) { r.layers[1].region = 0; });
    refused([](Rig& r) { r.layers[1].region = UINT64_MAX - 10; });
    refused([](Rig& r) { r.layers[1].region_bytes -= 1000; });
    refused([](Rig& r) { r.layers[1].base = 1000; });
    refused([](Rig& r) { r.layers[1].base = UINT64_MAX; });
    refused([](Rig& r) { r.layers[1].page_stride = 0; });
    refused([](Rig& r) { r.layers[1].page_stride = UINT64_MAX / 2; });
    refused([](Rig& r) { r.layers[1].blocks = 0; });
    refused([](Rig& r) { r.layers[1].blocks = UINT64_MAX; });
    refused([](Rig& r) { r.layers[1].first_extent = 2; });
    refused([](Rig& r) { r.layers[1].first_extent = UINT64_MAX; });
    refused([](Rig& r) { r.layers[1].extent_count = 0; });
    refused([](Rig& r) { r.layers[1].reserved = 1; });
    refused([](Rig& r) { r.extents[0].positions = 0; });
    refused([](Rig& r) { r.extents[0].positions = UINT64_MAX; });
    refused([](Rig& r) { r.extents[0].position_bytes = 0; });
    refused([](Rig& r) { r.extents[0].first_position = UINT64_MAX; });
    refused([](Rig& r) { r.extents[0].repeat = 0; });
    refused([](Rig& r) { r.extents[0].repeat = UINT64_MAX; });
    refused([](Rig& r) {
        r.extents[0] = {0, 1, 1, 0, (1 << 24) + 1, 0};  // more rows than are kept
    });
    refused([](Rig& r) { r.extents[0].repeat_stride = UINT64_MAX; });
    refused([](Rig& r) { r.extents[0].offset = UINT64_MAX; });
}

TEST(abi_handles_are_not_interchangeable) {
    Rig rig(6);
    sparkcache_placement* const placement = rig.open(host_config());
    const Closer closer{placement};
    const sparkcache_page page = whole(0, 1);
    sparkcache_placing* placing = nullptr;
    CHECK_OK(sparkcache_placing_begin(placement, &page, 1, nullptr, &placing));
    auto* const restore = reinterpret_cast<sparkcache_restore*>(placing);
    sparkcache_arena arena{};
    const sparkcache_verified_page verified{};
    CHECK_STATUS(sparkcache_restore_acquire(restore, 0, &arena), SPARKCACHE_INVALID_ARGUMENT);
    CHECK(last_error().find("a page placement, expected a direct restore") != std::string_view::npos);
    CHECK_STATUS(sparkcache_restore_submit(restore, 0, &verified, 1), SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_restore_finish(restore, 0), SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_restore_destroy(restore), SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_destroy(reinterpret_cast<sparkcache_placement*>(placing)),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_fence_destroy(reinterpret_cast<sparkcache_fence*>(placing)),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_placing_submit(nullptr, nullptr, 0, nullptr, 0, 0),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_placing_submit(placing, nullptr, 8, nullptr, 0, 0),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_placing_submit(placing, &page, 8, nullptr, 1, 0),
                 SPARKCACHE_INVALID_ARGUMENT);
    const sparkcache_span span{0, 0, 0, 1};
    CHECK_STATUS(sparkcache_placing_submit(placing, &page, 8, &span, UINT64_MAX, 0),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_placing_destroy(placing), SPARKCACHE_INVALID_STATE);
    CHECK_STATUS(sparkcache_destroy(placement), SPARKCACHE_INVALID_STATE);
    CHECK_OK(sparkcache_placing_abort(placing, 0));
    CHECK_STATUS(sparkcache_placing_abort(placing, 0), SPARKCACHE_INVALID_STATE);
    CHECK_OK(sparkcache_placing_destroy(placing));
    CHECK_STATUS(rig.describe(placement), SPARKCACHE_INVALID_STATE);

    const sparkcache_page partial{1, 3, 0, 0};
    CHECK_STATUS(sparkcache_placing_begin(placement, &partial, 1, nullptr, &placing),
                 SPARKCACHE_INVALID_ARGUMENT);
    const sparkcache_page reserved{1, SPARKCACHE_ALL_POSITIONS, 0, 1};
    CHECK_STATUS(sparkcache_placing_begin(placement, &reserved, 1, nullptr, &placing),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_STATUS(sparkcache_placing_begin(placement, &page, 1, nullptr, nullptr),
                 SPARKCACHE_INVALID_ARGUMENT);
    CHECK_OK(sparkcache_placing_destroy(nullptr));
    CHECK_OK(sparkcache_destroy(nullptr));
    CHECK_OK(sparkcache_fence_destroy(nullptr));
}

TEST(abi_needs_a_layout_before_a_transaction) {
    sparkcache_placement* placement = nullptr;
    const sparkcache_config config = host_config();
    CHECK_OK(sparkcache_create(&config, &placement));
    const sparkcache_page page = whole(0, 1);
    sparkcache_capture* capture = nullptr;
    CHECK_STATUS(sparkcache_capture_begin(placement, &page, 1, nullptr, &capture),
                 SPARKCACHE_INVALID_STATE);
    CHECK_OK(sparkcache_destroy(placement));
}
