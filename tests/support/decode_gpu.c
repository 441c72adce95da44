/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/decode_gpu.h"

#include "device.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    EXIT_SKIP = 77
};

static enum attn_status open_device(struct attn_device **device, int32_t grid_limit,
                                    const char *policy)
{
    struct attn_device_open_params params = ATTN_DEVICE_OPEN_PARAMS_INIT;
    params.kind = ATTN_DEVICE_ORDINAL;
    params.grid_limit = grid_limit;
    params.splitk_policy = policy;
    return attn_device_open(device, &params);
}

static void open_session(struct gpu_session *session, int32_t grid_limit, const char *policy)
{
    char why[256];
    cr_assert_eq(gpu_open(&session->gpu, 0, why, sizeof(why)), 0, "%s", why);
    cr_assert_eq(open_device(&session->device, grid_limit, policy), ATTN_OK, "%s",
                 attn_last_error());
    cr_assert_eq(gpu_stream_create(session->gpu, &session->stream), 0);
}

void gpu_session_open(struct gpu_session *session, int32_t grid_limit)
{
    open_session(session, grid_limit, NULL);
}

void gpu_session_open_policy(struct gpu_session *session, const char *policy)
{
    open_session(session, 0, policy);
}

void gpu_session_close(struct gpu_session *session)
{
    gpu_stream_destroy(session->gpu, session->stream);
    attn_device_close(&session->device);
    gpu_close(&session->gpu);
}

bool gpu_session_serves(const struct gpu_session *session, const struct decode_kind *kind)
{
    const struct attn_pack *const pack = session->device->pack;
    for (uint32_t i = 0; i < pack->num_rows; i++) {
        const struct attn_pack_row *const row = &pack->rows[i];
        if (row->op == ATTN_ROW_DECODE && row->q == (int32_t) kind->q_dtype &&
            row->kv == (int32_t) kind->kv_dtype && row->head_dim == kind->head_dim)
            return true;
    }
    return false;
}

int decode_remote_open(struct decode_remote *remote, struct gpu *gpu, struct decode_data *data)
{
    remote->gpu = gpu;
    remote->data = data;
    const int error = gpu_alloc(gpu, &remote->base, data->bytes);
    if (error) {
        remote->base = NULL;
        return error;
    }
    return decode_remote_reset(remote);
}

// What the image has in [start, end).
static int upload(struct decode_remote *remote, size_t start, size_t end)
{
    return gpu_upload(remote->gpu, (uint8_t *) remote->base + start, remote->data->image + start,
                      end - start);
}

static int download(struct decode_remote *remote, size_t start, size_t end)
{
    return gpu_download(remote->gpu, remote->data->result + start, (uint8_t *) remote->base + start,
                        end - start);
}

// From `start` on. The workspace is large, and the same byte all over.
static int reset_from(struct decode_remote *remote, size_t start)
{
    const struct decode_data *const data = remote->data;
    const struct canary_zone *const workspace = &data->zones[DECODE_ZONE_WORKSPACE];
    uint8_t *const base = remote->base;
    int error = upload(remote, start, workspace->offset);
    if (!error)
        error = gpu_fill(remote->gpu, base + workspace->offset, data->c.poison, workspace->bytes);
    return error ? error : upload(remote, workspace->offset + workspace->bytes, data->bytes);
}

// All but the workspace, which nobody looks at.
static int fetch_results(struct decode_remote *remote)
{
    const struct canary_zone *const workspace = &remote->data->zones[DECODE_ZONE_WORKSPACE];
    const int error = download(remote, 0, workspace->offset);
    if (error) return error;
    return download(remote, workspace->offset + workspace->bytes, remote->data->bytes);
}

int decode_remote_reset(struct decode_remote *remote)
{
    return reset_from(remote, 0);
}

int decode_remote_reset_outputs(struct decode_remote *remote)
{
    return reset_from(remote, remote->data->zones[DECODE_ZONE_O].offset);
}

int decode_remote_fetch_outputs(struct decode_remote *remote)
{
    return download(remote, remote->data->zones[DECODE_ZONE_O].offset, remote->data->bytes);
}

int decode_remote_fetch(struct decode_remote *remote)
{
    return download(remote, 0, remote->data->bytes);
}

void decode_remote_close(struct decode_remote *remote)
{
    if (remote->base) gpu_free(remote->gpu, remote->base);
    remote->base = NULL;
}

struct attn_decode_params decode_remote_params(const struct decode_remote *remote)
{
    return decode_data_params(remote->data, remote->base);
}

enum attn_status decode_data_run_gpu(struct decode_data *data, struct gpu_session *session)
{
    struct decode_remote remote;
    enum attn_status status = ATTN_ERROR_DRIVER;
    if (decode_remote_open(&remote, session->gpu, data)) goto out;
    const struct attn_decode_params params = decode_remote_params(&remote);
    status = attn_decode(session->device, &params, session->stream);
    if (status != ATTN_OK) goto out;
    if (gpu_stream_sync(session->gpu, session->stream) || fetch_results(&remote))
        status = ATTN_ERROR_DRIVER;
out:
    decode_remote_close(&remote);
    return status;
}

struct decode_data *decode_data_need(const struct decode_case *c, const struct gpu_session *session)
{
    char text[512];
    struct decode_data *data;
    cr_assert_eq(decode_data_build(&data, c, session->device), ATTN_OK, "%s: %s",
                 decode_case_text(c, text, sizeof(text)), attn_last_error());
    return data;
}

void decode_data_need_run(struct decode_data *data, struct gpu_session *session)
{
    char text[512];
    decode_case_text(&data->c, text, sizeof(text));
    cr_assert_eq(decode_data_run_gpu(data, session), ATTN_OK, "%s, %s: %s", data->kernel, text,
                 attn_last_error());
    cr_expect(decode_data_intact(data), "%s, %s: wrote where it should not", data->kernel, text);
}

void decode_remote_need_run(struct decode_remote *remote, struct gpu_session *session,
                            const struct attn_decode_params *params)
{
    cr_assert_eq(attn_decode(session->device, params, session->stream), ATTN_OK, "%s: %s",
                 remote->data->kernel, attn_last_error());
    cr_assert_eq(gpu_stream_sync(session->gpu, session->stream), 0, "%s", remote->data->kernel);
    cr_assert_eq(decode_remote_fetch_outputs(remote), 0);
}

// ---- main

// In the child: 0 to go on, 77 to skip, 1 for anything that should work and doesn't.
static int probe(void)
{
    struct attn_device *device;
    const enum attn_status status = open_device(&device, 0, NULL);
    if (status != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", attn_status_name(status), attn_last_error());
        return status == ATTN_ERROR_NO_DEVICE || status == ATTN_ERROR_NO_PACK ? EXIT_SKIP : 1;
    }
    char why[256];
    struct gpu *gpu;
    const int error = gpu_open(&gpu, 0, why, sizeof(why));
    if (error) fprintf(stderr, "%s\n", why);
    gpu_close(&gpu);
    attn_device_close(&device);
    return error ? 1 : 0;
}

int gpu_main(int argc, char **argv)
{
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) _exit(probe());
    int status;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 1;
    if (WEXITSTATUS(status) != 0) return WEXITSTATUS(status);

    struct criterion_test_set *const tests = criterion_initialize();
    int result = 0;
    if (criterion_handle_args(argc, argv, true)) result = criterion_run_all_tests(tests) ? 0 : 1;
    criterion_finalize(tests);
    return result;
}
