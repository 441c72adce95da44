/* SPDX-License-Identifier: Apache-2.0 */
// What every part of libattn shares: status codes, data types, the stream, and the rules that hold
// everywhere.
//
// Rules that hold everywhere
//   * Parameters travel in a struct whose first field, `size`, is its sizeof. Fields beyond `size`
//     count as 0; fields are only ever appended. So a program built against an older header works
//     with a newer library. Bytes beyond the library's own struct must be 0, or the call is
//     ATTN_ERROR_INVALID.
//   * Strides count elements, never bytes, and are int64_t. Sizes of buffers are bytes.
//   * Device pointers are memory of the device the handle was opened for; on a host device they are
//     ordinary pointers.
//   * A refused call writes nothing and enqueues nothing. The status is for the program; the
//     sentence for people is in attn_last_error() and goes to the log callback.
//   * Data that only the device sees (page ids, lengths) cannot be refused: it is never
//     dereferenced out of bounds, and is reported through the fault word of the call that takes
//     one.
//   * No call that enqueues work allocates, synchronises, or reads the environment. Nothing aborts.
//
// Reproducibility
//   The output bits of a sequence depend on that sequence alone: its query, its keys and values,
//   its length, and the scalars of the call. Not on the batch around it, page ids, table width,
//   strides, the number of SMs, the stream, or what else runs. Policy `legacy` (splitk.h) is the
//   one exception: there the bits depend on max_decode_seqs, too.
//
// Thread-safety, in one of three phrases
//   safe      any thread, any time, on the same handle
//   handle    any thread, but one call at a time on the same handle
//   pure      no state at all
#ifndef ATTN_COMMON_H
#define ATTN_COMMON_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ATTN_API __attribute__((visibility("default")))
#else
#define ATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum attn_status {
    // Success.
    ATTN_OK = 0,
    // "Not mine": the call is legal, but this entry leaves it to another one. Nothing was enqueued.
    ATTN_DECLINED = 1,
    // The caller's mistake: an argument breaks a rule of its header.
    ATTN_ERROR_INVALID = -1,
    // Legal, but this build has no kernel for it.
    ATTN_ERROR_UNSUPPORTED = -2,
    // No NVIDIA driver, no GPU, or no GPU of that ordinal.
    ATTN_ERROR_NO_DEVICE = -3,
    // A GPU, but no pack whose kernels run on it.
    ATTN_ERROR_NO_PACK = -4,
    // Host or device memory ran out.
    ATTN_ERROR_NO_MEMORY = -5,
    // The CUDA driver refused something; the sentence has its error code.
    ATTN_ERROR_DRIVER = -6,
    // A file could not be read or written.
    ATTN_ERROR_IO = -7,
};

// Element types. E4M3 is the finite-only 8-bit float (largest value 448, NaN 0x7F and 0xFF).
enum attn_dtype {
    ATTN_DTYPE_NONE = 0,
    ATTN_DTYPE_BF16 = 1,
    ATTN_DTYPE_FP16 = 2,
    ATTN_DTYPE_E4M3 = 3,
    ATTN_DTYPE_FP32 = 4,
    ATTN_DTYPE_INT32 = 5,
};

// The same pointer as a CUstream (and a cudaStream_t); NULL is the legacy default stream. Ignored
// on a host device.
typedef struct CUstream_st *attn_stream;

// The name of a status ("ATTN_ERROR_INVALID"), or "unknown status".
// Thread-safety: pure.
ATTN_API const char *attn_status_name(enum attn_status status);

// The name of a type ("bf16"), or "unknown".
// Thread-safety: pure.
ATTN_API const char *attn_dtype_name(enum attn_dtype dtype);

// Bytes of one element; 0 for ATTN_DTYPE_NONE and values outside the enum.
// Thread-safety: pure.
ATTN_API size_t attn_dtype_size(enum attn_dtype dtype);

// The sentence of this thread's last failed call: which argument, its value, the limit, what to do.
// "" if the thread's last call succeeded. Valid until the thread's next call into the library.
// Thread-safety: safe.
ATTN_API const char *attn_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
