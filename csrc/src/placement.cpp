// SPDX-License-Identifier: Apache-2.0
#include "placement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cuda_backend.h"
#include "host_backend.h"
#include "status.h"

namespace sparkcache {
namespace {

using ull = unsigned long long;

constexpr std::uint32_t kMostArenas = 64;
constexpr std::uint32_t kMostThreads = 64;
/// Enough to fill the memory bus of a desktop; a server's engine needs its cores for itself.
constexpr unsigned kDefaultThreads = 4;
/// Vectors of the kernels: staged bytes keep the alignment of their page.
constexpr std::uint64_t kVector = 16;

unsigned thread_count(std::uint32_t wanted) {
    if (wanted != 0) {
        return wanted;
    }
    return std::clamp(processors(), 1u, kDefaultThreads);
}

std::unique_ptr<Backend> make_backend(const sparkcache_config& config) {
    if (config.abi_version != SPARKCACHE_PLACEMENT_ABI) {
        fail(SPARKCACHE_UNSUPPORTED, "configuration of ABI %u, this library speaks %u",
             config.abi_version, SPARKCACHE_PLACEMENT_ABI);
    }
    if (config.arena_bytes == 0 || config.arena_bytes % SPARKCACHE_ARENA_ALIGNMENT != 0 ||
        config.arena_bytes > SIZE_MAX / 2) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "arena_bytes %llu; choose a multiple of %u",
             ull{config.arena_bytes}, SPARKCACHE_ARENA_ALIGNMENT);
    }
    if (config.arena_count < 1 || config.arena_count > kMostArenas) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "arena_count %u; choose 1 to %u", config.arena_count,
             kMostArenas);
    }
    if (config.host_threads > kMostThreads) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "host_threads %u; choose 0 to %u", config.host_threads,
             kMostThreads);
    }
    if (config.transfer > SPARKCACHE_TRANSFER_STAGED) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "transfer %u is none of SPARKCACHE_TRANSFER_…",
             config.transfer);
    }
    if (config.reserved[0] != 0 || config.reserved[1] != 0) {
        fail(SPARKCACHE_INVALID_ARGUMENT, "reserved words of the configuration must be 0");
    }
    const unsigned threads = thread_count(config.host_threads);
    switch (config.backend) {
        case SPARKCACHE_BACKEND_HOST:
            if (config.device != 0 || config.transfer != SPARKCACHE_TRANSFER_AUTO) {
                fail(SPARKCACHE_INVALID_ARGUMENT, "device and transfer belong to CUDA; pass 0");
            }
            return std::make_unique<HostBackend>(config.arena_count, config.arena_bytes, threads);
        case SPARKCACHE_BACKEND_CUDA:
            return std::make_unique<cuda::CudaBackend>(config, threads);
        default:
            fail(SPARKCACHE_INVALID_ARGUMENT, "backend %u is none of SPARKCACHE_BACKEND_…",
                 config.backend);
    }
}

void refuse_overlap_in_arena(std::span<const sparkcache_span> spans) {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
    places.reserve(spans.size());
    for (const sparkcache_span& span : spans) {
        // Sums that wrap belong to spans that the ledger refuses.
        places.emplace_back(span.source_offset, span.source_offset + span.length);
    }
    if (!std::is_sorted(places.begin(), places.end())) {
        std::sort(places.begin(), places.end());
    }
    for (std::size_t i = 1; i < places.size(); ++i) {
        if (places[i].first < places[i - 1].second) {
            fail(SPARKCACHE_COVERAGE,
                 "two spans share the arena's bytes from %llu on; give each its own place",
                 ull{places[i].first});
        }
    }
}

}  // namespace

Placement::Placement(const sparkcache_config& config)
    : Tagged(Kind::placement),
      arena_bytes_(config.arena_bytes),
      backend_(make_backend(config)),
      arenas_(config.arena_count) {}

void Placement::describe(std::span<const sparkcache_layer> layers,
                         std::span<const sparkcache_extent> extents) {
    if (described_) {
        fail(SPARKCACHE_INVALID_STATE, "pages are described already; create another placement");
    }
    Layout layout(layers, extents);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        backend_->check_region(i, layers[i].region, layers[i].region_bytes);
    }
    layout_.emplace(std::move(layout));
    described_ = true;
}

const Layout& Placement::layout() const {
    if (!described_) {
        fail(SPARKCACHE_INVALID_STATE, "no pages are described yet; call sparkcache_describe");
    }
    return *layout_;
}

sparkcache_stats Placement::stats() const {
    return {counters_.bytes_restored, counters_.bytes_captured, counters_.pages_restored,
            counters_.pages_captured, backend_->launches(),     counters_.finished,
            counters_.aborted,        counters_.open};
}

Transaction::Transaction(Kind what, Placement& placement, std::vector<Target> targets,
                         std::vector<Digest> digests, std::shared_ptr<Fence> after)
    : Tagged(what),
      placement_(placement),
      ledger_(placement.layout(), std::move(targets)),
      digests_(std::move(digests)),
      after_(std::move(after)) {
    ++placement_.counters().open;
}

Transaction::~Transaction() = default;

void Transaction::require_open() const {
    if (closed_) {
        fail(SPARKCACHE_INVALID_STATE, "the transaction is closed; begin another");
    }
}

sparkcache_arena Transaction::acquire(std::uint64_t timeout_ns) {
    require_open();
    const std::size_t index = placement_.arenas().acquire(this, Deadline(timeout_ns));
    return {index, reinterpret_cast<std::uintptr_t>(placement_.backend().arena(index)),
            placement_.arena_bytes()};
}

void Transaction::release(std::uint64_t index) {
    require_open();
    placement_.arenas().require_lent(index, this);
    std::shared_ptr<Work> work;
    if (const auto found = gathered_.find(index); found != gathered_.end()) {
        work = std::move(found->second);
        gathered_.erase(found);
    }
    placement_.arenas().give_back(index, std::move(work));
}

void Transaction::started(std::shared_ptr<Work> work) {
    if (work == nullptr) {
        return;
    }
    // Forget what is over, so that a long transaction does not grow; failures are kept.
    std::erase_if(works_, [](const std::shared_ptr<Work>& earlier) {
        return earlier->poll() == Work::State::done;
    });
    works_.push_back(std::move(work));
}

void Transaction::submit_verified(std::uint64_t index,
                                  std::span<const sparkcache_verified_page> pages) {
    require_open();
    placement_.arenas().require_lent(index, this);
    std::vector<sparkcache_span> spans;
    spans.reserve(pages.size());
    for (const sparkcache_verified_page& page : pages) {
        const Target& target = ledger_.target(page.page);
        const Digest& sealed = digests_[page.page];
        if (!std::equal(sealed.begin(), sealed.end(), std::begin(page.digest))) {
            fail(SPARKCACHE_UNVERIFIED,
                 "page %llu (group %u, block %llu): computed digest %02x%02x%02x%02x..., the "
                 "manifest demands %02x%02x%02x%02x...; do not place it, quarantine the root",
                 ull{page.page}, target.group->id, ull{target.block}, page.digest[0],
                 page.digest[1], page.digest[2], page.digest[3], sealed[0], sealed[1], sealed[2],
                 sealed[3]);
        }
        spans.push_back({page.page, 0, page.source_offset, target.group->page_bytes});
    }
    moves_.clear();
    ledger_.submit(spans, placement_.arena_bytes());
    broken_ = true;  // until the write is on its way
    plan_moves(ledger_, spans, moves_);
    Backend& backend = placement_.backend();
    std::shared_ptr<Work> work =
        backend.scatter(index, backend.arena(index), moves_, after_.get());
    started(work);
    placement_.arenas().give_back(index, std::move(work));
    for (const sparkcache_span& span : spans) {
        bytes_ += span.length;
    }
    broken_ = false;
}

void Transaction::submit_memory(std::span<const std::byte> source,
                                std::span<const sparkcache_span> spans,
                                std::uint64_t timeout_ns) {
    require_open();
    moves_.clear();
    ledger_.submit(spans, source.size());
    broken_ = true;
    plan_moves(ledger_, spans, moves_);
    if (placement_.backend().reads_any_memory()) {
        started(placement_.backend().scatter(0, source.data(), moves_, after_.get()));
    } else {
        stage(source, moves_, timeout_ns);
    }
    for (const sparkcache_span& span : spans) {
        bytes_ += span.length;
    }
    broken_ = false;
}

/// Pack moves into arenas, each at an offset that agrees with its page's alignment, so that the
/// kernels use their widest vectors whatever the caller's buffer looks like.
void Transaction::stage(std::span<const std::byte> source, std::span<const Move> moves,
                        std::uint64_t timeout_ns) {
    Backend& backend = placement_.backend();
    ArenaPool& pool = placement_.arenas();
    std::vector<Move> staged;
    std::size_t next = 0;
    std::uint64_t done = 0;  // of moves[next]
    while (next < moves.size()) {
        const std::size_t index = pool.acquire(this, Deadline(timeout_ns));
        std::byte* const arena = backend.arena(index);
        staged.clear();
        std::uint64_t at = 0;
        while (next < moves.size()) {
            const Move& move = moves[next];
            const std::uint64_t page = move.page + done;
            const std::uint64_t place = at + ((page - at) & (kVector - 1));
            if (place >= placement_.arena_bytes()) {
                break;
            }
            const std::uint64_t length =
                std::min(move.length - done, placement_.arena_bytes() - place);
            backend.copy_in(arena + place, source.data() + move.buffer + done, length);
            staged.push_back({page, place, length});
            at = place + length;
            done += length;
            if (done == move.length) {
                ++next;
                done = 0;
            }
        }
        std::shared_ptr<Work> work = backend.scatter(index, arena, staged, after_.get());
        started(work);
        pool.give_back(index, std::move(work));
    }
}

void Transaction::submit_gather(std::uint64_t index, std::span<const sparkcache_span> spans) {
    require_open();
    placement_.arenas().require_lent(index, this);
    if (gathered_.contains(index)) {
        fail(SPARKCACHE_INVALID_STATE,
             "arena %llu was submitted already; wait for it and release it", ull{index});
    }
    refuse_overlap_in_arena(spans);
    moves_.clear();
    ledger_.submit(spans, placement_.arena_bytes());
    broken_ = true;
    plan_moves(ledger_, spans, moves_);
    std::shared_ptr<Work> work = placement_.backend().gather(index, moves_, after_.get());
    started(work);
    gathered_.emplace(index, std::move(work));
    for (const sparkcache_span& span : spans) {
        bytes_ += span.length;
    }
    broken_ = false;
}

void Transaction::wait_gathered(std::uint64_t index, std::uint64_t timeout_ns) {
    require_open();
    placement_.arenas().require_lent(index, this);
    const auto found = gathered_.find(index);
    if (found == gathered_.end()) {
        fail(SPARKCACHE_INVALID_STATE, "nothing was submitted for arena %llu; submit first",
             ull{index});
    }
    if (found->second == nullptr) {
        return;
    }
    switch (await(*found->second, Deadline(timeout_ns))) {
        case Work::State::done:
            return;
        case Work::State::running:
            fail(SPARKCACHE_NOT_READY, "arena %llu is still being gathered into; call again",
                 ull{index});
        case Work::State::failed:
            broken_ = true;
            fail(SPARKCACHE_DEVICE, "%s; abort", found->second->failure());
    }
}

void Transaction::order(std::uint64_t stream) {
    require_open();
    for (const std::shared_ptr<Work>& work : works_) {
        work->order(stream);
    }
}

std::shared_ptr<Work> Transaction::drain(std::uint64_t timeout_ns) {
    const Deadline deadline(timeout_ns);
    std::shared_ptr<Work> failed;
    for (const std::shared_ptr<Work>& work : works_) {
        switch (await(*work, deadline)) {
            case Work::State::done:
                break;
            case Work::State::running:
                fail(SPARKCACHE_NOT_READY, "work is still in flight; call again");
            case Work::State::failed:
                failed = failed == nullptr ? work : failed;
                break;
        }
    }
    return failed;
}

void Transaction::finish(std::uint64_t timeout_ns) {
    require_open();
    if (broken_) {
        fail(SPARKCACHE_INVALID_STATE, "a submit of this transaction failed; abort it");
    }
    ledger_.require_complete();
    if (const std::shared_ptr<Work> failed = drain(timeout_ns); failed != nullptr) {
        close(false);
        fail(SPARKCACHE_DEVICE, "%s", failed->failure());
    }
    close(true);
}

void Transaction::abort(std::uint64_t timeout_ns) {
    require_open();
    static_cast<void>(drain(timeout_ns));  // it is given up, however it ended
    close(false);
}

void Transaction::close(bool finished) {
    closed_ = true;
    gathered_.clear();
    works_.clear();
    placement_.arenas().give_back_all(this);
    Counters& counters = placement_.counters();
    --counters.open;
    if (!finished) {
        ++counters.aborted;
        return;
    }
    ++counters.finished;
    const bool captured = kind == Kind::capture;
    (captured ? counters.bytes_captured : counters.bytes_restored) += bytes_;
    (captured ? counters.pages_captured : counters.pages_restored) += ledger_.targets().size();
}

}  // namespace sparkcache
