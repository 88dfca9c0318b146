// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend over a driver that is a fake (fake_cuda.cpp): order, limits, and every error
// that any call can answer with.
#include <algorithm>
#include <set>
#include <string>

#include "fake_cuda.h"
#include "rig.h"

using namespace check;

namespace {

struct {
    std::uint32_t magic = 0xBA55ED50;
    std::uint16_t version = 1;
    std::uint16_t header_bytes = 16;
    std::uint64_t payload_bytes = 0;
} const kFatbin;

sparkcache_config cuda_config(std::uint32_t transfer) {
    sparkcache_config config = host_config();
    config.backend = SPARKCACHE_BACKEND_CUDA;
    config.arena_bytes = 8192;
    config.transfer = transfer;
    config.fatbin = &kFatbin;
    config.fatbin_bytes = sizeof kFatbin;
    return config;
}

constexpr std::uint32_t kModes[] = {SPARKCACHE_TRANSFER_MAPPED, SPARKCACHE_TRANSFER_STAGED};

void adopt(const Rig& rig) {
    for (const auto& slab : rig.slabs) {
        fake_cuda_adopt(slab.data(), slab.size(), 0);
    }
}

std::uint64_t stream_of(void* stream) {
    return reinterpret_cast<std::uintptr_t>(stream);
}

/// What a run of all three kinds of transactions came to.
struct Outcome {
    bool restored = false;
    bool placed = false;
    bool captured = false;
    std::vector<std::uint8_t> capture;
    std::set<sparkcache_status> statuses;
};

constexpr std::uint8_t kRestored = 0x11;
constexpr std::uint8_t kPlaced = 0x22;
constexpr std::uint64_t kTimeout = kSecond / 5;

/// Restore block 2 of group 0, place block 3 of group 1, capture block 4 of group 0, whatever
/// fails on the way; leaves nothing open.
Outcome run_everything(const Rig& rig, std::uint32_t mode) {
    Outcome outcome;
    const auto ok = [&](sparkcache_status status) {
        outcome.statuses.insert(status);
        return status == SPARKCACHE_OK;
    };
    sparkcache_placement* placement = nullptr;
    const sparkcache_config config = cuda_config(mode);
    if (!ok(sparkcache_create(&config, &placement))) {
        CHECK(placement == nullptr);
        return outcome;
    }
    if (ok(rig.describe(placement))) {
        sparkcache_fence* fence = nullptr;
        if (!ok(sparkcache_fence_record(placement, 0, &fence))) {
            CHECK(fence == nullptr);
        }
        const sparkcache_sealed_page sealed{2, 0, 0, {1}};
        sparkcache_restore* restore = nullptr;
        CHECK_OK(sparkcache_restore_begin(placement, &sealed, 1, fence, &restore));
        sparkcache_arena arena{};
        if (ok(sparkcache_restore_acquire(restore, kTimeout, &arena))) {
            std::fill_n(bytes_of(arena), Rig::kAttentionPage, kRestored);
            const sparkcache_verified_page verified{0, 0, {1}};
            if (ok(sparkcache_restore_submit(restore, arena.index, &verified, 1))) {
                ok(sparkcache_restore_order(restore, 0));
                outcome.restored = ok(sparkcache_restore_finish(restore, kTimeout));
            }
        }
        if (sparkcache_restore_destroy(restore) != SPARKCACHE_OK) {
            CHECK_OK(sparkcache_restore_abort(restore, kTimeout));
            CHECK_OK(sparkcache_restore_destroy(restore));
        }

        const sparkcache_page page = whole(1, 3);
        sparkcache_placing* placing = nullptr;
        CHECK_OK(sparkcache_placing_begin(placement, &page, 1, fence, &placing));
        const std::vector<std::uint8_t> source(Rig::kStatePage, kPlaced);
        const sparkcache_span spans[] = {{0, 0, 0, 999}, {0, 999, 999, Rig::kStatePage - 999}};
        if (ok(sparkcache_placing_submit(placing, source.data(), source.size(), spans, 2,
                                         kTimeout))) {
            ok(sparkcache_placing_order(placing, 0));
            outcome.placed = ok(sparkcache_placing_finish(placing, kTimeout));
        }
        if (sparkcache_placing_destroy(placing) != SPARKCACHE_OK) {
            CHECK_OK(sparkcache_placing_abort(placing, kTimeout));
            CHECK_OK(sparkcache_placing_destroy(placing));
        }

        const sparkcache_page taken{4, 5, 0, 0};
        sparkcache_capture* capture = nullptr;
        CHECK_OK(sparkcache_capture_begin(placement, &taken, 1, fence, &capture));
        if (ok(sparkcache_capture_acquire(capture, kTimeout, &arena))) {
            const sparkcache_span span{0, 0, 0, Rig::kAttentionPage};
            if (ok(sparkcache_capture_submit(capture, arena.index, &span, 1)) &&
                ok(sparkcache_capture_wait(capture, arena.index, kTimeout))) {
                outcome.capture.assign(bytes_of(arena), bytes_of(arena) + Rig::kAttentionPage);
                ok(sparkcache_capture_order(capture, 0));
                outcome.captured = ok(sparkcache_capture_finish(capture, kTimeout));
            }
        }
        if (sparkcache_capture_destroy(capture) != SPARKCACHE_OK) {
            CHECK_OK(sparkcache_capture_abort(capture, kTimeout));
            CHECK_OK(sparkcache_capture_destroy(capture));
        }
        CHECK_OK(sparkcache_fence_destroy(fence));
    }
    CHECK_OK(sparkcache_destroy(placement));
    return outcome;
}

std::vector<std::uint8_t> kept(Rig& rig, std::uint64_t block, std::uint64_t positions) {
    std::vector<std::uint8_t> page = rig.read(0, block);
    constexpr std::uint64_t row = Rig::kPositions * Rig::kPositionBytes;
    for (std::uint64_t i = 0; i < page.size(); ++i) {
        if (i % row >= positions * Rig::kPositionBytes) {
            page[i] = 0;
        }
    }
    return page;
}

/// Every byte is as before, but for pages that were written whole, or may have been in part.
void check_memory(Rig& rig, const Rig& before, const Outcome& outcome) {
    std::set<const std::uint8_t*> restored;
    for (const std::uint8_t* byte : rig.page(0, 2)) {
        CHECK(*byte == kRestored || !outcome.restored);
        restored.insert(byte);
    }
    std::set<const std::uint8_t*> placed;
    for (const std::uint8_t* byte : rig.page(1, 3)) {
        CHECK(*byte == kPlaced || !outcome.placed);
        placed.insert(byte);
    }
    for (std::size_t slab = 0; slab < rig.slabs.size(); ++slab) {
        for (std::size_t i = 0; i < rig.slabs[slab].size(); ++i) {
            const std::uint8_t* const byte = &rig.slabs[slab][i];
            const std::uint8_t old = before.slabs[slab][i];
            CHECK(*byte == old || (*byte == kRestored && restored.contains(byte)) ||
                  (*byte == kPlaced && placed.contains(byte)));
        }
    }
}

}  // namespace

// First, while the process has no driver yet: a failed start is an answer, not a verdict.
TEST(cuda_0_a_driver_that_does_not_start_is_tried_again) {
    fake_cuda_reset();
    const sparkcache_config config = cuda_config(SPARKCACHE_TRANSFER_AUTO);
    sparkcache_placement* placement = nullptr;
    fake_cuda_fail(1, 100, 0);
    CHECK_STATUS(sparkcache_create(&config, &placement), SPARKCACHE_UNSUPPORTED);
    CHECK(last_error().find("CUDA_ERROR_NO_DEVICE") != std::string_view::npos);
    CHECK(fake_cuda_live() == 0);
    CHECK_OK(sparkcache_create(&config, &placement));
    CHECK_OK(sparkcache_destroy(placement));
    CHECK(fake_cuda_live() == 0);
}

TEST(cuda_every_call_may_fail_in_every_way) {
    // Lazy: work is still queued when the fault comes, and must be over before its memory goes.
    const struct {
        int code;
        int sticky;
        std::uint64_t lazy;
    } faults[] = {{1, 0, 0},   {2, 0, 0},   {100, 0, 0}, {999, 0, 0},
                  {700, 1, 0}, {719, 1, 0}, {1, 0, 2},   {700, 1, 2}};
    for (const std::uint32_t mode : kModes) {
        std::set<std::string> failed_calls;
        fake_cuda_reset();
        Rig clean(11);
        const Rig before = clean;
        adopt(clean);
        const std::vector<std::uint8_t> expected = kept(clean, 4, 5);
        const Outcome outcome = run_everything(clean, mode);
        CHECK(outcome.restored && outcome.placed && outcome.captured);
        CHECK(outcome.capture == expected);
        CHECK(outcome.statuses.size() == 1);
        check_memory(clean, before, outcome);
        CHECK(fake_cuda_live() == 0);
        const std::uint64_t calls = fake_cuda_calls();
        CHECK(calls > 60);
        for (const auto& fault : faults) {
            for (std::uint64_t nth = 1; nth <= calls; ++nth) {
                fake_cuda_reset();
                Rig rig(11);
                adopt(rig);
                fake_cuda_lazy(fault.lazy);
                fake_cuda_fail(nth, fault.code, fault.sticky);
                const Outcome faulty = run_everything(rig, mode);
                const std::string failed = fake_cuda_failed_call();
                CHECK(!failed.empty());
                failed_calls.insert(failed);
                check_memory(rig, before, faulty);
                if (faulty.captured) {
                    CHECK(faulty.capture == expected);
                }
                for (const sparkcache_status status : faulty.statuses) {
                    CHECK(status != SPARKCACHE_INTERNAL && status != SPARKCACHE_COVERAGE);
                }
                fake_cuda_run();  // what is still queued now would touch memory that is gone
                CHECK(fake_cuda_live() == 0);
                CHECK(fake_cuda_depth() == 0);
            }
        }
        std::string all;
        for (const std::string& name : failed_calls) {
            all += " " + name;
        }
        std::printf("  %s: %llu calls x %zu faults:%s\n",
                    mode == SPARKCACHE_TRANSFER_MAPPED ? "mapped" : "staged",
                    static_cast<unsigned long long>(calls), std::size(faults), all.c_str());
    }
}

TEST(cuda_work_that_takes_its_time_is_waited_for) {
    for (const std::uint32_t mode : kModes) {
        fake_cuda_reset();
        fake_cuda_lazy(3);
        Rig rig(12);
        const Rig before = rig;
        adopt(rig);
        const Outcome outcome = run_everything(rig, mode);
        CHECK(outcome.restored && outcome.placed && outcome.captured);
        check_memory(rig, before, outcome);
        CHECK(fake_cuda_live() == 0);
    }
}

TEST(cuda_nothing_moves_before_the_fence_and_the_engine_waits_when_told) {
    for (const std::uint32_t mode : kModes) {
        fake_cuda_reset();
        Rig rig(13);
        adopt(rig);
        sparkcache_placement* const placement = rig.open(cuda_config(mode));
        // The engine zeroes the block on its stream, which has not come to it yet.
        void* const engine = fake_cuda_stalled_stream();
        void* const later = fake_cuda_stalled_stream();
        fake_cuda_open_stream(later);
        fake_cuda_fill(engine, &rig.slabs[0][2 * Rig::kStride], 0, Rig::kStride);
        sparkcache_fence* fence = nullptr;
        CHECK_OK(sparkcache_fence_record(placement, stream_of(engine), &fence));

        const sparkcache_sealed_page sealed{2, 1, 0, {9}};
        sparkcache_restore* restore = nullptr;
        CHECK_OK(sparkcache_restore_begin(placement, &sealed, 1, fence, &restore));
        CHECK_OK(sparkcache_fence_destroy(fence));
        sparkcache_arena arena{};
        CHECK_OK(sparkcache_restore_acquire(restore, 0, &arena));
        std::fill_n(bytes_of(arena), Rig::kStatePage, std::uint8_t{0x5A});
        const sparkcache_verified_page verified{0, 0, {9}};
        const std::vector<std::uint8_t> old = rig.read(1, 2);
        CHECK_OK(sparkcache_restore_submit(restore, arena.index, &verified, 1));
        CHECK_OK(sparkcache_restore_order(restore, stream_of(later)));
        fake_cuda_fill(later, &rig.slabs[0][2 * Rig::kStride], 0x77, 10);
        fake_cuda_run();
        CHECK_STATUS(sparkcache_restore_finish(restore, kSecond / 200), SPARKCACHE_NOT_READY);
        CHECK_STATUS(sparkcache_restore_abort(restore, kSecond / 200), SPARKCACHE_NOT_READY);
        CHECK_STATUS(sparkcache_restore_destroy(restore), SPARKCACHE_INVALID_STATE);
        CHECK_STATUS(sparkcache_destroy(placement), SPARKCACHE_INVALID_STATE);
        CHECK(rig.read(1, 2) == old);

        fake_cuda_open_stream(engine);
        CHECK_OK(sparkcache_restore_finish(restore, kSecond));
        CHECK_OK(sparkcache_restore_destroy(restore));
        const std::vector<std::uint8_t> found = rig.read(1, 2);
        for (std::size_t i = 0; i < found.size(); ++i) {
            CHECK(found[i] == (i < 10 ? 0x77 : 0x5A));
        }
        CHECK_OK(sparkcache_destroy(placement));
        fake_cuda_free_stream(engine);
        fake_cuda_free_stream(later);
        CHECK(fake_cuda_live() == 0);
    }
}

TEST(cuda_a_capture_sees_what_was_before_the_fence_and_overwriting_waits) {
    for (const std::uint32_t mode : kModes) {
        fake_cuda_reset();
        Rig rig(14);
        adopt(rig);
        sparkcache_placement* const placement = rig.open(cuda_config(mode));
        void* const engine = fake_cuda_stalled_stream();
        fake_cuda_fill(engine, &rig.slabs[0][5 * Rig::kStride], 0x33, Rig::kStride);
        sparkcache_fence* fence = nullptr;
        CHECK_OK(sparkcache_fence_record(placement, stream_of(engine), &fence));
        const sparkcache_page page = whole(1, 5);
        sparkcache_capture* capture = nullptr;
        CHECK_OK(sparkcache_capture_begin(placement, &page, 1, fence, &capture));
        sparkcache_arena arena{};
        CHECK_OK(sparkcache_capture_acquire(capture, 0, &arena));
        const sparkcache_span span{0, 0, 0, Rig::kStatePage};
        CHECK_STATUS(sparkcache_capture_wait(capture, arena.index, 0), SPARKCACHE_INVALID_STATE);
        CHECK_OK(sparkcache_capture_submit(capture, arena.index, &span, 1));
        CHECK_OK(sparkcache_capture_order(capture, stream_of(engine)));
        fake_cuda_fill(engine, &rig.slabs[0][5 * Rig::kStride], 0x44, Rig::kStride);
        CHECK_STATUS(sparkcache_capture_wait(capture, arena.index, 1000), SPARKCACHE_NOT_READY);
        fake_cuda_open_stream(engine);
        CHECK_OK(sparkcache_capture_wait(capture, arena.index, kSecond));
        CHECK(std::all_of(bytes_of(arena), bytes_of(arena) + Rig::kStatePage,
                          [](std::uint8_t byte) { return byte == 0x33; }));
        CHECK(rig.read(1, 5)[0] == 0x44);
        CHECK_OK(sparkcache_capture_finish(capture, kSecond));
        CHECK_OK(sparkcache_capture_destroy(capture));
        CHECK_OK(sparkcache_fence_destroy(fence));
        CHECK_OK(sparkcache_destroy(placement));
        fake_cuda_free_stream(engine);
        CHECK(fake_cuda_live() == 0);
    }
}

TEST(cuda_a_damaged_descriptor_fails_the_restore_and_writes_nothing_astray) {
    for (const std::uint32_t mode : kModes) {
        for (const int damage : {1, 2}) {
            fake_cuda_reset();
            Rig rig(15);
            const Rig before = rig;
            adopt(rig);
            fake_cuda_damage(damage);
            const Outcome outcome = run_everything(rig, mode);
            CHECK(!outcome.restored && outcome.placed && outcome.captured);
            CHECK(outcome.statuses.contains(SPARKCACHE_DEVICE));
            check_memory(rig, before, outcome);
            CHECK(fake_cuda_live() == 0);
        }
    }
}

TEST(cuda_more_pieces_than_descriptors_take_several_launches) {
    for (const std::uint32_t mode : kModes) {
        fake_cuda_reset();
        constexpr std::uint64_t kRows = 3000;
        std::vector<std::uint8_t> memory(2 * 3 * kRows, 0xEE);
        fake_cuda_adopt(memory.data(), memory.size(), 0);
        const sparkcache_extent extent{1, 1, 2, 0, kRows, 3};  // rows of two bytes, a byte apart
        const sparkcache_layer layer{reinterpret_cast<std::uintptr_t>(memory.data()),
                                     memory.size(), 0, 3 * kRows, 2, 0, 1, 0, 0};
        const sparkcache_config config = cuda_config(mode);
        sparkcache_placement* placement = nullptr;
        CHECK_OK(sparkcache_create(&config, &placement));
        CHECK_OK(sparkcache_describe(placement, &layer, 1, &extent, 1));
        const sparkcache_sealed_page page{1, 0, 0, {}};
        sparkcache_restore* restore = nullptr;
        CHECK_OK(sparkcache_restore_begin(placement, &page, 1, nullptr, &restore));
        sparkcache_arena arena{};
        CHECK_OK(sparkcache_restore_acquire(restore, 0, &arena));
        std::fill_n(bytes_of(arena), 2 * kRows, std::uint8_t{0x42});
        const sparkcache_verified_page verified{};
        CHECK_OK(sparkcache_restore_submit(restore, arena.index, &verified, 1));
        CHECK_OK(sparkcache_restore_finish(restore, kSecond));
        CHECK_OK(sparkcache_restore_destroy(restore));
        for (std::uint64_t i = 0; i < memory.size(); ++i) {
            CHECK(memory[i] == (i >= 3 * kRows && i % 3 != 0 ? 0x42 : 0xEE));
        }
        sparkcache_stats stats{};
        CHECK_OK(sparkcache_get_stats(placement, &stats));
        CHECK(stats.launches == 3);
        CHECK_OK(sparkcache_destroy(placement));
    }
}

TEST(cuda_refuses_the_wrong_device_and_a_fatbin_that_is_none) {
    fake_cuda_reset();
    Rig rig(16);
    sparkcache_placement* placement = nullptr;
    sparkcache_config config = cuda_config(SPARKCACHE_TRANSFER_STAGED);
    CHECK_OK(sparkcache_create(&config, &placement));
    CHECK_STATUS(rig.describe(placement), SPARKCACHE_INVALID_ARGUMENT);  // host memory
    fake_cuda_adopt(rig.slabs[0].data(), rig.slabs[0].size(), 0);
    fake_cuda_adopt(rig.slabs[1].data(), rig.slabs[1].size(), 1);
    CHECK_STATUS(rig.describe(placement), SPARKCACHE_INVALID_ARGUMENT);
    CHECK(last_error().find("device 1") != std::string_view::npos);
    adopt(rig);
    CHECK_OK(rig.describe(placement));
    CHECK_OK(sparkcache_destroy(placement));

    const auto refused = [&](auto change, sparkcache_status status) {
        sparkcache_config changed = config;
        change(changed);
        sparkcache_placement* none = nullptr;
        CHECK_STATUS(sparkcache_create(&changed, &none), status);
        CHECK(fake_cuda_live() == 0);
    };
    refused([](auto& c) { c.device = 7; }, SPARKCACHE_UNSUPPORTED);
    refused([](auto& c) { c.device = -1; }, SPARKCACHE_UNSUPPORTED);
    refused([](auto& c) { c.fatbin = nullptr; }, SPARKCACHE_INVALID_ARGUMENT);
    refused([](auto& c) { c.fatbin_bytes = 15; }, SPARKCACHE_INVALID_ARGUMENT);
    auto cut = kFatbin;
    cut.payload_bytes = 1;
    refused([&](auto& c) { c.fatbin = &cut; }, SPARKCACHE_INVALID_ARGUMENT);
    auto other = kFatbin;
    other.magic = 0x464C457F;
    refused([&](auto& c) { c.fatbin = &other; }, SPARKCACHE_INVALID_ARGUMENT);
}

TEST(cuda_integrated_devices_are_mapped_without_being_told) {
    fake_cuda_reset();
    const sparkcache_config config = cuda_config(SPARKCACHE_TRANSFER_AUTO);
    sparkcache_placement* placement = nullptr;
    CHECK_OK(sparkcache_create(&config, &placement));
    const std::uint64_t discrete = fake_cuda_live();
    CHECK_OK(sparkcache_destroy(placement));
    fake_cuda_integrated(1);
    CHECK_OK(sparkcache_create(&config, &placement));
    // No device copy of arena and descriptors, for each of two arenas.
    CHECK(discrete - fake_cuda_live() == 4);
    CHECK_OK(sparkcache_destroy(placement));
    CHECK(fake_cuda_live() == 0);
}
