/* SPDX-License-Identifier: Apache-2.0 */
// Runs decode cases on a GPU, and a test program's main for machines with and without one.
#ifndef ATTN_TESTS_DECODE_GPU_H
#define ATTN_TESTS_DECODE_GPU_H

#include "cli/gpu.h"
#include "tests/support/decode_case.h"

// What a test works with; opened inside the test, as no CUDA context may exist before Criterion
// forks.
struct gpu_session {
    struct gpu *gpu;
    struct attn_device *device;
    attn_stream stream;
};

// Fail the test if something can't be opened. grid_limit and policy as in attn_device_open_params.
void gpu_session_open(struct gpu_session *session, int32_t grid_limit);
void gpu_session_open_policy(struct gpu_session *session, const char *policy);
void gpu_session_close(struct gpu_session *session);

// True if the table of the pack in use has a kernel of that kind.
bool gpu_session_serves(const struct gpu_session *session, const struct decode_kind *kind);

// The image of a case in GPU memory.
struct decode_remote {
    struct gpu *gpu;
    struct decode_data *data;
    void *base;
};

// Each returns 0 or a CUresult. open allocates and uploads the image; reset uploads it again; fetch
// downloads all of it into the result. The two of outputs do so from zone O on.
int decode_remote_open(struct decode_remote *remote, struct gpu *gpu, struct decode_data *data);
int decode_remote_reset(struct decode_remote *remote);
int decode_remote_reset_outputs(struct decode_remote *remote);
int decode_remote_fetch(struct decode_remote *remote);
int decode_remote_fetch_outputs(struct decode_remote *remote);
void decode_remote_close(struct decode_remote *remote);
struct attn_decode_params decode_remote_params(const struct decode_remote *remote);

// Upload, run, wait, download; ATTN_ERROR_DRIVER where a transfer failed.
enum attn_status decode_data_run_gpu(struct decode_data *data, struct gpu_session *session);

// The same three steps, for tests: fail the test where a call or a transfer does. run_remote leaves
// inputs and workspace as they are, and brings back the outputs alone.
struct decode_data *decode_data_need(const struct decode_case *c,
                                     const struct gpu_session *session);
void decode_data_need_run(struct decode_data *data, struct gpu_session *session);
void decode_remote_need_run(struct decode_remote *remote, struct gpu_session *session,
                            const struct attn_decode_params *params);

// Runs the program's tests. Returns what main returns: 77, a skip for `meson test`, where there is
// no GPU or no pack fits it; that is found out in a process of its own.
int gpu_main(int argc, char **argv);

#endif
