/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * @brief Moves KV cache pages between an engine's memory and host buffers. Plain C ABI, version 1.
 *
 * Words: a *page* is what one block owns in one group over every layer of the group. Its
 * *encoded* form is the concatenation, without gaps, of its layers in the order described, of
 * each layer's extents in order, of each extent's rows. An *arena* is a staging buffer owned by
 * the placement. A *transaction* moves a fixed set of pages, every byte exactly once.
 *
 * Two interfaces write pages and are never interchangeable: ::sparkcache_restore (files to
 * arenas to pages, each page sealed by the digest that its manifest demands) and
 * ::sparkcache_placing (bytes that were authenticated elsewhere). They have different handle,
 * page and span types, and a handle of one passed to the other is refused.
 *
 * Conventions
 *  - Every function returns a ::sparkcache_status and never throws, exits or writes to a stream.
 *    What went wrong, in words, is in the calling thread's sparkcache_last_error().
 *  - A call that is refused has changed nothing, unless its documentation says otherwise.
 *  - Timeouts are nanoseconds; SPARKCACHE_NOT_READY means that the same call may be repeated.
 *  - Handles may be used from any thread. One transaction belongs to one thread at a time;
 *    different transactions of one placement may run in different threads.
 *  - Structures carry no implicit padding; `reserved` members must be zero.
 */
#ifndef SPARKCACHE_PLACEMENT_H
#define SPARKCACHE_PLACEMENT_H

#include <stdint.h>

#if defined(__GNUC__)
#define SPARKCACHE_API __attribute__((visibility("default")))
#else
#define SPARKCACHE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Version of everything in this file. Another version is another library. */
#define SPARKCACHE_PLACEMENT_ABI 1u
/** Bytes of a page digest. */
#define SPARKCACHE_DIGEST_BYTES 32u
/** A message, its terminating NUL included, is never longer. */
#define SPARKCACHE_MESSAGE_BYTES 512u
/** Arenas begin and end on this boundary, so that files can be read into them with O_DIRECT. */
#define SPARKCACHE_ARENA_ALIGNMENT 4096u
/** Value of sparkcache_page::positions that keeps the whole page. */
#define SPARKCACHE_ALL_POSITIONS UINT64_MAX

/** What a call came to. */
typedef int32_t sparkcache_status;
enum {
    SPARKCACHE_OK = 0,
    SPARKCACHE_INVALID_ARGUMENT = 1, /**< can never be right: null block, span out of bounds */
    SPARKCACHE_INVALID_STATE = 2,    /**< not now: closed transaction, arena lent elsewhere */
    SPARKCACHE_COVERAGE = 3,         /**< destinations overlap, or bytes repeat or are missing */
    SPARKCACHE_UNVERIFIED = 4,       /**< the computed digest is not the sealed one */
    SPARKCACHE_NOT_READY = 5,        /**< not within the timeout; call again */
    SPARKCACHE_NO_MEMORY = 6,        /**< host or device memory is short */
    SPARKCACHE_UNSUPPORTED = 7,      /**< no driver, no such device, no kernels for it */
    SPARKCACHE_DEVICE = 8,           /**< the driver or the device failed */
    SPARKCACHE_INTERNAL = 9          /**< a bug in this library */
};

/** Where pages live and who copies. */
enum {
    SPARKCACHE_BACKEND_HOST = 0, /**< host memory, copied by threads */
    SPARKCACHE_BACKEND_CUDA = 1  /**< memory of one CUDA device, copied by kernels */
};

/** How bytes get from an arena to a CUDA device. */
enum {
    SPARKCACHE_TRANSFER_AUTO = 0,   /**< mapped on integrated devices (unified memory), else staged */
    SPARKCACHE_TRANSFER_MAPPED = 1, /**< kernels read and write the pinned host arena itself */
    SPARKCACHE_TRANSFER_STAGED = 2  /**< one bulk copy per arena, kernels work in device memory */
};

/** Bits of sparkcache_abi_info::capabilities. */
enum {
    SPARKCACHE_CAN_HOST = 1u << 0,
    SPARKCACHE_CAN_CUDA = 1u << 1 /**< compiled in; whether a driver is there, create() tells */
};

/** Filled by sparkcache_query(); a binding compares each size with its own. */
typedef struct sparkcache_abi_info {
    uint32_t abi_version;
    uint32_t capabilities;
    uint32_t config_bytes;
    uint32_t layer_bytes;
    uint32_t extent_bytes;
    uint32_t page_bytes;
    uint32_t sealed_page_bytes;
    uint32_t span_bytes;
    uint32_t verified_page_bytes;
    uint32_t arena_bytes;
    uint32_t stats_bytes;
    uint32_t reserved;
} sparkcache_abi_info;

/** How to make a placement. */
typedef struct sparkcache_config {
    uint32_t abi_version;  /**< ::SPARKCACHE_PLACEMENT_ABI */
    uint32_t backend;      /**< SPARKCACHE_BACKEND_… */
    uint64_t arena_bytes;  /**< per arena; a multiple of ::SPARKCACHE_ARENA_ALIGNMENT */
    uint32_t arena_count;  /**< 1 … 64, shared by all transactions */
    uint32_t host_threads; /**< threads that copy on the host, the caller included; 0 picks */
    int32_t device;        /**< CUDA ordinal; 0 on the host */
    uint32_t transfer;     /**< SPARKCACHE_TRANSFER_…; 0 on the host */
    const void* fatbin;    /**< kernels.fatbin, read and authenticated by the caller; CUDA only */
    uint64_t fatbin_bytes;
    uint64_t reserved[2];
} sparkcache_config;

/** One layer's pages: block b of its group begins at `base + b * page_stride`. */
typedef struct sparkcache_layer {
    uint64_t region;       /**< address of the memory that holds all blocks */
    uint64_t region_bytes; /**< its size: every byte of every block lies inside */
    uint64_t base;         /**< offset of block 0 in the region */
    uint64_t page_stride;  /**< bytes from one block to the next */
    uint64_t blocks;       /**< number of blocks, the null block 0 included */
    uint64_t first_extent; /**< index into the extents that are described with the layers */
    uint64_t extent_count;
    uint32_t group;
    uint32_t reserved;
} sparkcache_layer;

/**
 * Rows of token positions inside a block: `repeat` rows at
 * `offset + r * repeat_stride`, each `positions * position_bytes` long. Position p of a row
 * holds token `first_position + p` of the block. A recurrent state is one position.
 */
typedef struct sparkcache_extent {
    uint64_t offset;
    uint64_t positions;
    uint64_t position_bytes;
    uint64_t first_position;
    uint64_t repeat;
    uint64_t repeat_stride;
} sparkcache_extent;

/** A page to place or to capture. */
typedef struct sparkcache_page {
    uint64_t block;
    uint64_t positions; /**< captures keep the first so many, zeros after; placing: ALL_POSITIONS */
    uint32_t group;
    uint32_t reserved;
} sparkcache_page;

/** A page of a direct restore. */
typedef struct sparkcache_sealed_page {
    uint64_t block;
    uint32_t group;
    uint32_t reserved;
    uint8_t digest[SPARKCACHE_DIGEST_BYTES]; /**< what the authenticated manifest demands */
} sparkcache_sealed_page;

/** Bytes of page number `page` of the transaction; in ascending order per page, no gaps. */
typedef struct sparkcache_span {
    uint64_t page;
    uint64_t page_offset;
    uint64_t source_offset; /**< in the arena or in the caller's buffer */
    uint64_t length;
} sparkcache_span;

/** A whole page that lies in an arena. */
typedef struct sparkcache_verified_page {
    uint64_t page;
    uint64_t source_offset;
    uint8_t digest[SPARKCACHE_DIGEST_BYTES]; /**< what was computed over those very bytes */
} sparkcache_verified_page;

/** An arena that was lent to a transaction. */
typedef struct sparkcache_arena {
    uint64_t index;
    uint64_t address; /**< host address, writable */
    uint64_t bytes;
} sparkcache_arena;

/** Counters since create(). */
typedef struct sparkcache_stats {
    uint64_t bytes_restored;
    uint64_t bytes_captured;
    uint64_t pages_restored;
    uint64_t pages_captured;
    uint64_t launches; /**< kernel launches, or host copy calls */
    uint64_t transactions_finished;
    uint64_t transactions_aborted;
    uint64_t transactions_open;
} sparkcache_stats;

typedef struct sparkcache_placement sparkcache_placement; /**< geometry, arenas, device */
typedef struct sparkcache_fence sparkcache_fence;         /**< a point in the engine's stream */
typedef struct sparkcache_restore sparkcache_restore;     /**< files → arenas → pages */
typedef struct sparkcache_placing sparkcache_placing;     /**< verified memory → pages */
typedef struct sparkcache_capture sparkcache_capture;     /**< pages → arenas */

/**
 * @brief Ask what this library is, before anything else.
 * @param abi_version The caller's ::SPARKCACHE_PLACEMENT_ABI.
 * @param[out] info   Filled also when the versions differ, so that both can be named.
 * @return SPARKCACHE_UNSUPPORTED if the library speaks another version.
 */
SPARKCACHE_API sparkcache_status sparkcache_query(uint32_t abi_version, sparkcache_abi_info* info);

/** @brief The constant's name, `"SPARKCACHE_OK"`; never NULL. */
SPARKCACHE_API const char* sparkcache_status_name(sparkcache_status status);

/**
 * @brief Copy the message of the calling thread's last failed call.
 * @param[out] buffer Receives at most `capacity` bytes, always NUL-terminated if capacity > 0.
 * @return The message's length without the NUL.
 */
SPARKCACHE_API uint64_t sparkcache_last_error(char* buffer, uint64_t capacity);

/**
 * @brief Make a placement: allocate arenas, start threads, load kernels.
 * @param config         Copied; `fatbin` must live until the call returns.
 * @param[out] placement Set on success only.
 * @return SPARKCACHE_UNSUPPORTED without driver, device or kernels for it.
 */
SPARKCACHE_API sparkcache_status sparkcache_create(const sparkcache_config* config,
                                                   sparkcache_placement** placement);

/**
 * @brief Free everything; NULL is a no-op.
 * @return SPARKCACHE_INVALID_STATE while transactions exist; nothing is freed then. Fences may
 *         outlive their placement.
 */
SPARKCACHE_API sparkcache_status sparkcache_destroy(sparkcache_placement* placement);

/**
 * @brief Describe the pages of all groups, once, before the first transaction.
 *
 * On CUDA each region is checked to be memory of the placement's device.
 * @param layers,layer_count   In the order of the encoded page.
 * @param extents,extent_count What the layers' `first_extent` and `extent_count` point into.
 */
SPARKCACHE_API sparkcache_status sparkcache_describe(sparkcache_placement* placement,
                                                     const sparkcache_layer* layers,
                                                     uint64_t layer_count,
                                                     const sparkcache_extent* extents,
                                                     uint64_t extent_count);

/** @brief Read the counters. */
SPARKCACHE_API sparkcache_status sparkcache_get_stats(const sparkcache_placement* placement,
                                                      sparkcache_stats* stats);

/**
 * @brief Mark the present end of a stream of the engine. Cheap: for the model's own thread.
 * @param stream A `CUstream` as an integer (0: the legacy default stream); ignored on the host.
 */
SPARKCACHE_API sparkcache_status sparkcache_fence_record(sparkcache_placement* placement,
                                                         uint64_t stream,
                                                         sparkcache_fence** fence);

/** @brief Free a fence; transactions that were opened behind it keep their order. */
SPARKCACHE_API sparkcache_status sparkcache_fence_destroy(sparkcache_fence* fence);

/**
 * @brief Open a direct restore.
 *
 * Each page must be a described, non-null block, and no two pages may share a byte, over all
 * layers, extents and groups, however groups overlay each other.
 * @param pages,page_count Numbered from 0 in this order; copied.
 * @param after            Nothing is written before this point; NULL for no such point.
 * @return SPARKCACHE_COVERAGE if pages share bytes.
 */
SPARKCACHE_API sparkcache_status sparkcache_restore_begin(sparkcache_placement* placement,
                                                          const sparkcache_sealed_page* pages,
                                                          uint64_t page_count,
                                                          const sparkcache_fence* after,
                                                          sparkcache_restore** restore);

/** @brief Borrow a free arena, to read files into and to hash there. */
SPARKCACHE_API sparkcache_status sparkcache_restore_acquire(sparkcache_restore* restore,
                                                            uint64_t timeout_ns,
                                                            sparkcache_arena* arena);

/** @brief Give an arena back without using it. */
SPARKCACHE_API sparkcache_status sparkcache_restore_release(sparkcache_restore* restore,
                                                            uint64_t arena_index);

/**
 * @brief Write whole pages out of an arena. The arena goes back to the pool by itself.
 * @return SPARKCACHE_UNVERIFIED if a digest differs from the sealed one, SPARKCACHE_COVERAGE if
 *         a page was submitted before: nothing of this call is written, the arena stays lent.
 *         After SPARKCACHE_DEVICE or SPARKCACHE_NO_MEMORY only abort is possible.
 */
SPARKCACHE_API sparkcache_status sparkcache_restore_submit(sparkcache_restore* restore,
                                                           uint64_t arena_index,
                                                           const sparkcache_verified_page* pages,
                                                           uint64_t page_count);

/**
 * @brief Make a stream of the engine wait for everything submitted so far; does not block.
 *
 * Not needed before using the pages after a successful finish.
 */
SPARKCACHE_API sparkcache_status sparkcache_restore_order(sparkcache_restore* restore,
                                                          uint64_t stream);

/**
 * @brief Wait until every byte is in its page, and close.
 * @return SPARKCACHE_COVERAGE if a byte was not submitted (still open); SPARKCACHE_NOT_READY
 *         (still open); SPARKCACHE_DEVICE if the device failed (closed, nothing in flight).
 */
SPARKCACHE_API sparkcache_status sparkcache_restore_finish(sparkcache_restore* restore,
                                                           uint64_t timeout_ns);

/**
 * @brief Close without finishing, once nothing submitted can touch a page any more.
 *
 * Kernels cannot be cancelled, so this waits for them. After SPARKCACHE_NOT_READY the blocks
 * must not be reused yet; call again.
 */
SPARKCACHE_API sparkcache_status sparkcache_restore_abort(sparkcache_restore* restore,
                                                          uint64_t timeout_ns);

/** @brief Free a closed restore; NULL is a no-op. SPARKCACHE_INVALID_STATE if it is open. */
SPARKCACHE_API sparkcache_status sparkcache_restore_destroy(sparkcache_restore* restore);

/** @brief Open a page placement; refuses as sparkcache_restore_begin(). */
SPARKCACHE_API sparkcache_status sparkcache_placing_begin(sparkcache_placement* placement,
                                                          const sparkcache_page* pages,
                                                          uint64_t page_count,
                                                          const sparkcache_fence* after,
                                                          sparkcache_placing** placing);

/**
 * @brief Write spans out of the caller's memory, which is free again on return.
 *
 * On CUDA the bytes are staged through arenas, for which this waits up to `timeout_ns` each.
 * @return SPARKCACHE_COVERAGE: nothing of this call is written. After SPARKCACHE_NOT_READY,
 *         SPARKCACHE_DEVICE or SPARKCACHE_NO_MEMORY only abort is possible.
 */
SPARKCACHE_API sparkcache_status sparkcache_placing_submit(sparkcache_placing* placing,
                                                           const void* source,
                                                           uint64_t source_bytes,
                                                           const sparkcache_span* spans,
                                                           uint64_t span_count,
                                                           uint64_t timeout_ns);

/** @brief As sparkcache_restore_order(). */
SPARKCACHE_API sparkcache_status sparkcache_placing_order(sparkcache_placing* placing,
                                                          uint64_t stream);
/** @brief As sparkcache_restore_finish(). */
SPARKCACHE_API sparkcache_status sparkcache_placing_finish(sparkcache_placing* placing,
                                                           uint64_t timeout_ns);
/** @brief As sparkcache_restore_abort(). */
SPARKCACHE_API sparkcache_status sparkcache_placing_abort(sparkcache_placing* placing,
                                                          uint64_t timeout_ns);
/** @brief As sparkcache_restore_destroy(). */
SPARKCACHE_API sparkcache_status sparkcache_placing_destroy(sparkcache_placing* placing);

/** @brief Open a capture; refuses as sparkcache_restore_begin(). */
SPARKCACHE_API sparkcache_status sparkcache_capture_begin(sparkcache_placement* placement,
                                                          const sparkcache_page* pages,
                                                          uint64_t page_count,
                                                          const sparkcache_fence* after,
                                                          sparkcache_capture** capture);

/** @brief Borrow a free arena to gather into. */
SPARKCACHE_API sparkcache_status sparkcache_capture_acquire(sparkcache_capture* capture,
                                                            uint64_t timeout_ns,
                                                            sparkcache_arena* arena);

/** @brief Give an arena back; its bytes are not to be used any more. */
SPARKCACHE_API sparkcache_status sparkcache_capture_release(sparkcache_capture* capture,
                                                            uint64_t arena_index);

/**
 * @brief Start to gather spans into an arena; spans must not overlap there.
 *
 * Positions that a page does not keep become zeros. Bytes of the arena outside the spans are
 * unspecified afterwards. One submit per borrowed arena.
 */
SPARKCACHE_API sparkcache_status sparkcache_capture_submit(sparkcache_capture* capture,
                                                           uint64_t arena_index,
                                                           const sparkcache_span* spans,
                                                           uint64_t span_count);

/** @brief Wait until an arena holds what was submitted for it. */
SPARKCACHE_API sparkcache_status sparkcache_capture_wait(sparkcache_capture* capture,
                                                         uint64_t arena_index,
                                                         uint64_t timeout_ns);

/** @brief As sparkcache_restore_order(): overwriting the pages after this is safe. */
SPARKCACHE_API sparkcache_status sparkcache_capture_order(sparkcache_capture* capture,
                                                          uint64_t stream);
/** @brief As sparkcache_restore_finish(); borrowed arenas go back. */
SPARKCACHE_API sparkcache_status sparkcache_capture_finish(sparkcache_capture* capture,
                                                           uint64_t timeout_ns);
/** @brief As sparkcache_restore_abort(). */
SPARKCACHE_API sparkcache_status sparkcache_capture_abort(sparkcache_capture* capture,
                                                          uint64_t timeout_ns);
/** @brief As sparkcache_restore_destroy(). */
SPARKCACHE_API sparkcache_status sparkcache_capture_destroy(sparkcache_capture* capture);

#ifdef __cplusplus
}
#endif

#endif
