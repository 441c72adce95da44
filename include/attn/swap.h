/* SPDX-License-Identifier: Apache-2.0 */
// Decode over a KV cache that is larger than the GPU's memory: its blocks lie in pinned host memory
// or in a file, and pass through a fixed number of slots on the GPU.
//
//   s_j = scale * (q . k_j) for every key j of the sequence's first seq_len tokens
//   o   = sum_j e^(s_j) v_j / sum_j e^(s_j)          lse = ln(sum_j e^(s_j))
//
// A block is the keys and values of block_size tokens in one layer. A call of attn_swap_decode cuts
// the lists of its sequences into tiles, brings the blocks that are not resident into slots, and
// folds tile after tile into a running state, as tiled.h says: the bits are those of
// attn_tiled_step_tile over the whole list, whatever was resident, evicted or read again. A tile
// uses one of num_planes planes, in turn. Blocks of one tile are read and copied while tiles before
// it are computed.
//
// Blocks stay resident until their slot is needed, or they are written or invalidated. Slots of
// blocks that two rounds of their layer have passed over go first, else those used last: a cache of
// which a share f is resident, apart from slots of tiles in work, costs 1 - f of its bytes in every
// round. What is evicted never changes what is attended.
//
// Unlike other calls that enqueue work, attn_swap_decode may wait: for reads of a file, and for the
// GPU once num_planes tiles are enqueued. It can't be captured in a graph. It does not allocate.
//
// The layout of a block, in host memory, in a file and in a slot:
//   [K, V][kv_head][token][head_dim]
// In a file the tokens of one kv_head of K or of V, a stripe, are padded to a multiple of 4096
// bytes, and so they are in slots then. Blocks follow one another: [layer][block].
//
// The file, in the machine's byte order, which its header names:
//   0            the header, 4096 bytes; integers, in this order:
//                  char magic[8] "ATTNSWAP"     uint32 version 1
//                  uint32 byte order 0x01020304 uint32 bytes of the header, 4096
//                  int32  dtype, num_layers, num_blocks, num_kv_heads, head_dim, block_size, 0
//                  uint64 bytes of a stripe     uint64 offset of the first index
//                  uint64 bytes of an index     uint64 offset of the blocks
//                  uint64 bytes of the file     uint64 checksum: FNV-1a of the header with 0 here
//                and zeros
//   4096, 8192   two commit records, a page each:
//                  char magic[8] "ATTNCMIT"     uint64 number of the commit
//                  uint64 checksum of the index uint64 checksum: FNV-1a of the 24 bytes before
//   12288        two indexes, each padded to 4096 bytes: int32 [num_layers, num_blocks], how many
//                tokens a block holds. Commit n uses record and index n % 2. The checksum is the
//                sum over pages p of FNV-1a of the page, continued with uint64 p.
//                the blocks
// FNV-1a is that of 64 bits. The commit of the highest number whose checksums are right is in
// force. attn_swap_flush writes blocks and index, waits for the disk, then writes the record, and
// waits again: a program that is killed at any point leaves a file with everything that the last
// completed flush has acknowledged. Tokens appended after that do not touch those; a block that was
// written over may hold old rows, new ones, or some of each.
#ifndef ATTN_SWAP_H
#define ATTN_SWAP_H

#include "common.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum attn_swap_backing {
    // Pinned host memory.
    ATTN_SWAP_HOST = 1,
    // A file of the format above, locked while it is open.
    ATTN_SWAP_FILE = 2,
};

enum attn_swap_open {
    // Opens the file, or makes it if there is none.
    ATTN_SWAP_OPEN_OR_CREATE = 0,
    // A missing file is ATTN_ERROR_IO.
    ATTN_SWAP_OPEN = 1,
    // A file that is there is ATTN_ERROR_INVALID.
    ATTN_SWAP_CREATE = 2,
};

// What reads files. Both take a file without the page cache where its file system can (O_DIRECT).
enum attn_swap_reader {
    // io_uring where there is liburing.so.2 and the kernel lets this process use it, else threads.
    ATTN_SWAP_READER_AUTO = 0,
    // io_uring, with registered buffers where the limit of locked memory allows, through liburing,
    // which is opened when it is first wanted.
    ATTN_SWAP_READER_URING = 1,
    // A pool of threads that call pread.
    ATTN_SWAP_READER_THREADS = 2,
};

struct attn_swap_dims {
    // sizeof(struct attn_swap_dims).
    uint32_t size;
    // Type of q, keys, values and output: BF16 or FP16.
    enum attn_dtype dtype;
    // Blocks are numbered from 0 in each layer; num_layers * num_blocks is at most 2^31 - 1.
    int32_t num_layers, num_blocks;
    // Sequences of a call at most.
    int32_t max_seqs;
    // num_q_heads is a multiple of num_kv_heads.
    int32_t num_q_heads, num_kv_heads;
    // 64, 128 or 256.
    int32_t head_dim;
    // Tokens of a block.
    int32_t block_size;
    // Slots on the GPU: at least num_planes * tile_blocks.
    int32_t resident_blocks;
    // Different blocks of a tile at most; of one sequence, also with those listed twice. 0: what 64
    // MiB hold, but not more than resident_blocks / num_planes / 4, and at least 1.
    int32_t tile_blocks;
    // Tiles in work at a time, 2 .. 16. 0: 2.
    int32_t num_planes;
};

// Everything 0, except size and dtype BF16.
#define ATTN_SWAP_DIMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_swap_dims), ATTN_DTYPE_BF16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

struct attn_swap_create_params {
    // sizeof(struct attn_swap_create_params).
    uint32_t size;
    enum attn_swap_backing backing;
    // Copied.
    const struct attn_swap_dims *dims;
    // ATTN_SWAP_HOST: host memory [num_layers, num_blocks] blocks, 4096-byte aligned, which is
    // pinned until attn_swap_destroy, and has to be there until then; NULL: allocated here. Either
    // way blocks hold no tokens at first: see attn_swap_invalidate. ATTN_SWAP_FILE: NULL.
    void *pool;
    // ATTN_SWAP_FILE: where it is. ATTN_SWAP_HOST: NULL.
    const char *path;
    enum attn_swap_open open;
    enum attn_swap_reader reader;
    // ATTN_SWAP_FILE: bytes of the buffers that reads go through, a multiple of 4096 up to 2^30.
    // They are 2 to 64 buffers, of 512 KiB if that fits. 0: 32 MiB. ATTN_SWAP_HOST: 0.
    int64_t staging_bytes;
    // Keeps the times of the last so many tiles for attn_swap_get_tile, 0 .. 65536. That costs some
    // events a tile; 0: nothing is kept, and it costs nothing.
    int32_t trace_tiles;
};

// Everything 0 or NULL, except size and backing ATTN_SWAP_HOST.
#define ATTN_SWAP_CREATE_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_swap_create_params), ATTN_SWAP_HOST, 0, 0, 0, \
            ATTN_SWAP_OPEN_OR_CREATE, ATTN_SWAP_READER_AUTO, 0, 0 \
    }

struct attn_swap_info {
    // sizeof(struct attn_swap_info), set by the caller; no more than that is written.
    uint32_t size;
    // As used, where dims had 0.
    int32_t tile_blocks, num_planes;
    // 1 if the file is read without the page cache; 0 in attn_swap_sizes.
    int32_t direct;
    // Of a block in a slot, in host memory or in a file, and of one of its stripes.
    int64_t block_bytes, stripe_bytes;
    // Of the pool in host memory, the caller's or not; 0 with a file.
    int64_t pool_bytes;
    // Of the file; 0 without.
    int64_t file_bytes;
    // Taken on the device: resident_blocks slots, num_planes tables, the running state. Without
    // the workspace of its tiles: see attn_tiled_workspace_bytes.
    int64_t device_bytes;
    // Taken on the host beside the pool: tables, staging, 9 bytes for each block and 28 for each
    // slot, the trace, and what is as small.
    int64_t host_bytes;
    // "host memory", "io_uring" or "threads"; "" in attn_swap_sizes with a file.
    char backend[32];
    // Reads of the file that are under way at a time, and bytes of each, at most; 0 without a file.
    // In attn_swap_sizes those of io_uring: a pool of threads may have fewer.
    int32_t num_reads;
    int64_t read_bytes;
};

struct attn_swap_stats {
    // sizeof(struct attn_swap_stats), set by the caller; no more than that is written.
    uint32_t size;
    // Blocks that are resident now.
    int32_t resident;
    // Since attn_swap_create: calls of attn_swap_decode that succeeded, and tiles computed.
    uint64_t calls, tiles;
    // Listed blocks that were resident or already on their way, and those that had to be brought;
    // their sum is the number of listed blocks.
    uint64_t hits, misses;
    // Blocks that lost their slot to another one.
    uint64_t evictions;
    // Read from the file; copied to the device, without tables; how many copies that took, adjacent
    // blocks together.
    uint64_t bytes_read, bytes_copied, copies;
    // Reads that were waited for.
    uint64_t stalls;
    // Written to host memory or the file by attn_swap_write.
    uint64_t bytes_written;
};

struct attn_swap;

// ATTN_ERROR_INVALID: dims is NULL, breaks a rule above, has a count below 1, or sizes that are
// more than 2^63 - 1 bytes.
// Thread-safety: safe.
ATTN_API enum attn_status attn_swap_validate(const struct attn_swap_dims *dims);

// What attn_swap_create would take, without a device: path, open and pool are not looked at.
// ATTN_ERROR_INVALID: as attn_swap_create.
// Thread-safety: safe.
ATTN_API enum attn_status attn_swap_sizes(const struct attn_swap_create_params *params,
                                          struct attn_swap_info *info);

// Makes a cache without resident blocks; *swap is NULL on failure. `device` has to be open until
// attn_swap_destroy. A new file has its whole size from the start, where the file system can.
// ATTN_ERROR_INVALID: a null pointer, a rule of dims or params is broken, the file is a folder,
// foreign, of a newer version or another byte order, of another geometry, damaged, shorter than its
// header says, or open elsewhere. Nothing is written then, and a file that was made is removed.
// ATTN_ERROR_UNSUPPORTED: what attn_tiled_create does not serve; ATTN_SWAP_READER_URING where there
// is none. ATTN_ERROR_IO: with file and errno. ATTN_ERROR_NO_DEVICE: ATTN_DEVICE_TARGET.
// ATTN_ERROR_NO_MEMORY, ATTN_ERROR_DRIVER.
// Thread-safety: safe.
ATTN_API enum attn_status attn_swap_create(struct attn_swap **swap, struct attn_device *device,
                                           const struct attn_swap_create_params *params);

// Waits for the work that is in flight on it, frees *swap and sets it to NULL; NULL and a pointer
// to NULL are fine. The file stays as it is, without a flush.
// Thread-safety: handle.
ATTN_API void attn_swap_destroy(struct attn_swap **swap);

// Fills *info. ATTN_ERROR_INVALID: a null pointer or info->size below 4.
// Thread-safety: safe.
ATTN_API enum attn_status attn_swap_describe(const struct attn_swap *swap,
                                             struct attn_swap_info *info);

// Fills *stats. ATTN_ERROR_INVALID: a null pointer or stats->size below 4.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_get_stats(const struct attn_swap *swap,
                                              struct attn_swap_stats *stats);

struct attn_swap_write_params {
    // sizeof(struct attn_swap_write_params).
    uint32_t size;
    int32_t layer, block;
    // Which tokens of the block: from first_token on, at most as many as the block holds, so that
    // there are no gaps; first_token + num_tokens is at most block_size.
    int32_t first_token, num_tokens;
    // Host memory, num_tokens of each, 2-byte aligned; may lie in the same memory.
    const void *k, *v;
    // Elements between two tokens, and between two heads of a token. Both 0: dense
    // [token, kv_head, head_dim].
    int64_t token_stride, head_stride;
};

// Everything 0 or NULL, except size.
#define ATTN_SWAP_WRITE_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_swap_write_params), 0, 0, 0, 0, 0, 0, 0, 0 \
    }

// Writes tokens of one block, which then holds first_token + num_tokens; what it held behind that
// is gone. Its resident copy is not used again. Waits for copies from the pool that are in flight.
// ATTN_ERROR_INVALID: a null pointer, or a rule is broken; ATTN_ERROR_DRIVER: copies, or what a
// failed call has left, cannot be waited for; nothing was written. ATTN_ERROR_IO: the file, with
// offset and errno; the block then holds at most first_token tokens.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_write(struct attn_swap *swap,
                                          const struct attn_swap_write_params *params);

// From now on the block holds its first num_tokens tokens, and its resident copy is not used again.
// A caller that writes to its own pool does that before, when no call that lists the block is in
// flight, and then says so here; the block may so grow up to block_size. Otherwise num_tokens is at
// most what the block holds; 0 empties it.
// ATTN_ERROR_INVALID: swap is NULL, or a number out of range. ATTN_ERROR_DRIVER: what a failed call
// has left cannot be waited for; nothing has changed.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_invalidate(struct attn_swap *swap, int32_t layer, int32_t block,
                                               int32_t num_tokens);

// Tokens that a block holds; -1, with its sentence, if swap is NULL or a number out of range.
// Thread-safety: handle.
ATTN_API int32_t attn_swap_tokens(const struct attn_swap *swap, int32_t layer, int32_t block);

// Everything written and invalidated so far is on the disk when this returns ATTN_OK. Nothing to do
// in host memory. ATTN_ERROR_INVALID: swap is NULL. ATTN_ERROR_IO: with file, offset and errno. The
// commit before stays in force. Once the disk has failed to take what it was given, no later flush
// of this handle succeeds.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_flush(struct attn_swap *swap);

struct attn_swap_decode_params {
    // sizeof(struct attn_swap_decode_params).
    uint32_t size;
    int32_t layer;
    // 0 .. max_seqs; 0 enqueues nothing.
    int32_t num_seqs;
    // Multiplies q . k. Finite; 0: 1 / sqrt(head_dim).
    float scale;
    // [num_seqs, num_q_heads, head_dim], dense, device memory, 16-byte aligned.
    const void *q;
    // As q.
    void *output;
    // FP32 [num_seqs, num_q_heads], device memory, natural log; NULL: not wanted.
    float *lse;
    // int32, host memory, read before the call returns: tokens of each sequence, from 0 up; and
    // from blocks + i * blocks_stride on its blocks, as many as its tokens need, each holding as
    // many tokens as are attended. Sequences may share blocks, and one may list a block twice.
    const int32_t *seq_lens;
    const int32_t *blocks;
    int64_t blocks_stride;
};

// Everything 0 or NULL, except size.
#define ATTN_SWAP_DECODE_PARAMS_INIT \
    { \
        (uint32_t) sizeof(struct attn_swap_decode_params), 0, 0, 0, 0, 0, 0, 0, 0, 0 \
    }

// Enqueues on `stream`, with copies on a stream of its own; returns when everything has been
// enqueued, and so when all reads are done. On the host it computes. Calls on different streams run
// one after the other.
// ATTN_ERROR_INVALID: a null pointer, or a rule is broken; nothing was enqueued. ATTN_ERROR_IO: a
// read failed, or the file is shorter than it was; with file, offset and errno. ATTN_ERROR_DRIVER,
// ATTN_ERROR_NO_MEMORY: the driver's error. After any of these output and lse are as they were, or
// with a driver's error undefined, and no block counts as resident: the next call starts anew.
// Source of the contract: the Metrale swap engine's streaming decode.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_decode(struct attn_swap *swap,
                                           const struct attn_swap_decode_params *params,
                                           attn_stream stream);

// When the parts of a tile began and ended, in microseconds since the first call of
// attn_swap_decode began its work. On a GPU times of copies and computing are those of its streams:
// milliseconds in FP32, and so to a microsecond or two in the first half minute, coarser later.
struct attn_swap_tile {
    // sizeof(struct attn_swap_tile), set by the caller; no more than that is written.
    uint32_t size;
    // Of the call.
    int32_t layer;
    // Tiles are numbered from 1 on.
    uint64_t number;
    // Of the blocks that were brought.
    int64_t bytes;
    // The first read of the file was submitted, the last one had been waited for, and may have been
    // there before; 0 without reads.
    double read_start, read_end;
    // Of the blocks that were brought, and of the tile's table, with what they waited for in
    // between; its fold into the state.
    double copy_start, copy_end, compute_start, compute_end;
};

// Fills *tile, for the tile before the last one by `ago`: 0 is the last one. Waits until it is
// computed. ATTN_ERROR_INVALID: a null pointer, tile->size below 4, or a tile that is not kept: see
// trace_tiles. ATTN_ERROR_DRIVER.
// Thread-safety: handle.
ATTN_API enum attn_status attn_swap_get_tile(const struct attn_swap *swap, int32_t ago,
                                             struct attn_swap_tile *tile);

// What ATTN_SWAP_READER_AUTO stands for in this process: "io_uring" or "threads".
// Thread-safety: safe.
ATTN_API const char *attn_swap_file_backend(void);

#ifdef __cplusplus
}
#endif

#endif
