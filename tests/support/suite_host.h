/* SPDX-License-Identifier: Apache-2.0 */
// Of a test program, for the suites that every device has (short_suite.h, tiled_suite.h): the
// device's memory is the host's, and a call is done when it returns.
#ifndef ATTN_TESTS_SUITE_HOST_H
#define ATTN_TESTS_SUITE_HOST_H

#include "attn/attn.h"

#include <stdlib.h>

static const attn_stream stream = NULL;
static struct attn_device *device;

// No byte more than is asked for.
static void *take(const size_t bytes)
{
    void *memory;
    return posix_memalign(&memory, 256, bytes) ? NULL : memory;
}

static void release(void *const memory)
{
    free(memory);
}

static void finish(void)
{
}

#endif
