/* SPDX-License-Identifier: Apache-2.0 */
// As suite_host.h, on a GPU: managed memory, a stream of its own.
#ifndef ATTN_TESTS_SUITE_GPU_H
#define ATTN_TESTS_SUITE_GPU_H

#include "attn/attn.h"
#include "tests/support/decode_gpu.h"

#include <criterion/criterion.h>

static struct gpu_session session;
static struct attn_device *device;
static attn_stream stream;

static void *take(const size_t bytes)
{
    void *memory;
    return gpu_alloc_managed(session.gpu, &memory, bytes) ? NULL : memory;
}

static void release(void *const memory)
{
    gpu_free(session.gpu, memory);
}

static void finish(void)
{
    cr_assert_eq(gpu_stream_sync(session.gpu, stream), 0);
}

static void open_session(const int32_t grid_limit)
{
    gpu_session_open(&session, grid_limit);
    device = session.device;
    stream = session.stream;
}

#endif
