/* SPDX-License-Identifier: Apache-2.0 */
// The CTM decode runner: its contract and its sizes. host/ctm.c has what it is as a call of decode.
#include "attn/ctm.h"

#include "buffers.h"
#include "decode_core.h"
#include "host/ctm.h"
#include "kernels/decode/decode_params.h"
#include "status.h"

#include <math.h>

#define ROW_ALIGNMENT 16
#define WORKSPACE_ALIGNMENT 256
#define MASK_WORD_BITS 32

// What is set aside, in slots of the merge tree of MAX_ROWS query rows: for as many blocks and
// units as keep a chip busy, and what one block with one unit needs however many lanes there are. A
// lane has 8 query rows of a KV head or more.
enum {
    MAX_ROWS = 16,
    MIN_ROWS = 8,
    MAX_WARPS = 8,
    DECODE_SLOTS = 1024,
    // A kernel with 64 rows has a quarter as many slots.
    TREE_SLOTS = 8192,
    LANE_SLOTS = 8,
    // Of so many levels of the merge tree each, at least: 2^31 keys are fewer than 2^27 leaves.
    MAX_ROOT_LEVELS = (27 + ATTN_DECODE_LEAST_FAN_LOG - 1) / ATTN_DECODE_LEAST_FAN_LOG,
};

// ATTN_REQUIRE with the log of `device`.
#define REQUIRE(condition, ...) ATTN_REQUIRE(device->log, device->log_user, condition, __VA_ARGS__)

// ---- what is served

static bool head_dim_ok(const int32_t head_dim)
{
    return head_dim == 32 || head_dim == 64 || head_dim == 128 || head_dim == 256 ||
           head_dim == 512;
}

// Query heads a KV head; 0 where that is no whole number.
static int32_t ratio_of(const int32_t num_q_heads, const int32_t num_kv_heads)
{
    if (num_q_heads < 1 || num_kv_heads < 1 || num_q_heads % num_kv_heads != 0) return 0;
    return num_q_heads / num_kv_heads;
}

bool attn_ctm_supported(const int32_t num_q_heads, const int32_t num_kv_heads,
                        const int32_t head_dim, const bool fp8_kv, const int32_t sliding_window,
                        const bool sinks)
{
    (void) sinks;
    const int32_t ratio = ratio_of(num_q_heads, num_kv_heads);
    const int32_t most =
        fp8_kv || head_dim >= 128 ? ATTN_CTM_MAX_GQA_RATIO_R16 : ATTN_CTM_MAX_GQA_RATIO;
    return head_dim_ok(head_dim) && ratio >= 1 && ratio <= most && sliding_window >= 0;
}

bool attn_ctm_supported_tree(const int32_t num_q_heads, const int32_t num_kv_heads,
                             const int32_t head_dim, const bool fp8_kv,
                             const int32_t sliding_window, const bool contiguous_query_swa)
{
    (void) contiguous_query_swa;
    const int32_t ratio = ratio_of(num_q_heads, num_kv_heads);
    return head_dim_ok(head_dim) && !(fp8_kv && head_dim == 32) && ratio >= 1 &&
           ratio <= ATTN_CTM_MAX_GQA_RATIO_R16 && sliding_window >= 0;
}

bool attn_ctm_supports_tree_query_seq_len(const int32_t q_len)
{
    return q_len >= 1 && q_len <= ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN;
}

// ---- sizes

static int64_t count_floats(const int64_t slots, const int32_t head_dim)
{
    return slots * ATTN_DECODE_SLOT_FLOATS(head_dim, MAX_ROWS, MAX_WARPS);
}

// Two words for the schedule, and on each level the arrivals at each root.
static int64_t count_semaphores(const int64_t slots)
{
    const int64_t count = 2 + MAX_ROOT_LEVELS * slots * (MAX_ROWS / MIN_ROWS);
    return count <= INT32_MAX ? count : -1;
}

static int64_t count_decode_slots(const int64_t lanes)
{
    return DECODE_SLOTS + LANE_SLOTS * lanes;
}

static int64_t count_tree_slots(const int32_t q_len, const int32_t num_q_heads,
                                const int32_t num_kv_heads)
{
    const int64_t lanes = (int64_t) num_q_heads * q_len / MIN_ROWS + num_kv_heads;
    return TREE_SLOTS + LANE_SLOTS * lanes;
}

int64_t attn_ctm_workspace_elems(const int32_t batch_size, const int32_t num_q_heads,
                                 const int32_t head_dim)
{
    if (batch_size < 0 || num_q_heads < 1 || !head_dim_ok(head_dim)) return -1;
    if (batch_size == 0) return 0;
    // However the query heads are grouped, there are no more lanes than heads.
    return count_floats(count_decode_slots(num_q_heads), head_dim);
}

int64_t attn_ctm_semaphore_elems(const int32_t batch_size, const int32_t num_kv_heads)
{
    if (batch_size < 0 || num_kv_heads < 1) return -1;
    if (batch_size == 0) return 0;
    return count_semaphores(
        count_decode_slots((int64_t) num_kv_heads * ATTN_CTM_MAX_GQA_RATIO_R16));
}

int64_t attn_ctm_tree_workspace_elems(const int32_t batch_size, const int32_t q_len,
                                      const int32_t num_q_heads, const int32_t num_kv_heads,
                                      const int32_t head_dim)
{
    if (batch_size < 0 || !attn_ctm_supports_tree_query_seq_len(q_len) ||
        !attn_ctm_supported_tree(num_q_heads, num_kv_heads, head_dim, false, 0, false))
        return -1;
    if (batch_size == 0) return 0;
    const int64_t tree = count_floats(count_tree_slots(q_len, num_q_heads, num_kv_heads), head_dim);
    const int64_t decode = attn_ctm_workspace_elems(batch_size, num_q_heads, head_dim);
    return tree > decode ? tree : decode;
}

int64_t attn_ctm_tree_semaphore_elems(const int32_t batch_size, const int32_t q_len,
                                      const int32_t num_q_heads, const int32_t num_kv_heads)
{
    const int32_t any_head_dim = 128;
    if (batch_size < 0 || !attn_ctm_supports_tree_query_seq_len(q_len) ||
        !attn_ctm_supported_tree(num_q_heads, num_kv_heads, any_head_dim, false, 0, false))
        return -1;
    if (batch_size == 0) return 0;
    const int64_t tree = count_semaphores(count_tree_slots(q_len, num_q_heads, num_kv_heads));
    const int64_t decode = attn_ctm_semaphore_elems(batch_size, num_kv_heads);
    return tree < 0 || decode < 0 ? -1 : tree > decode ? tree : decode;
}

// With q_len 1 either is enough: the smaller.
static int64_t workspace_of(const struct attn_ctm_params *const p)
{
    if (p->q_len == 1) return attn_ctm_workspace_elems(p->batch_size, p->num_q_heads, p->head_dim);
    return attn_ctm_tree_workspace_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads,
                                         p->head_dim);
}

static int64_t semaphores_of(const struct attn_ctm_params *const p)
{
    if (p->q_len == 1) return attn_ctm_semaphore_elems(p->batch_size, p->num_kv_heads);
    return attn_ctm_tree_semaphore_elems(p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads);
}

// ---- checks

static enum attn_status check_sizes(const struct attn_device *const device,
                                    const struct attn_ctm_params *const p)
{
    REQUIRE(p->batch_size >= 0, "batch_size is %d: it may not be negative", p->batch_size);
    REQUIRE(p->q_len >= 1, "q_len is %d: it has to be at least 1", p->q_len);
    REQUIRE(p->num_q_heads >= 1, "num_q_heads is %d: it has to be at least 1", p->num_q_heads);
    REQUIRE(p->num_kv_heads >= 1, "num_kv_heads is %d: it has to be at least 1", p->num_kv_heads);
    REQUIRE(p->num_q_heads % p->num_kv_heads == 0,
            "num_q_heads is %d, num_kv_heads %d: the first has to be a multiple of the second",
            p->num_q_heads, p->num_kv_heads);
    REQUIRE(p->head_dim >= 1, "head_dim is %d: it has to be at least 1", p->head_dim);
    REQUIRE(p->num_pages >= 1 && p->num_pages <= INT32_MAX / 2,
            "num_pages is %d: it has to be in 1..%d, as page ids are int32 and the pool has twice "
            "as many",
            p->num_pages, INT32_MAX / 2);
    REQUIRE(p->max_pages_per_seq >= 1, "max_pages_per_seq is %d: it has to be at least 1",
            p->max_pages_per_seq);
    REQUIRE(p->sliding_window >= 0, "sliding_window is %d: it has to be 0 (all keys) or positive",
            p->sliding_window);
    return ATTN_OK;
}

static enum attn_status check_supported(const struct attn_device *const device,
                                        const struct attn_ctm_params *const p)
{
    const attn_log_fn log = device->log;
    void *const user = device->log_user;
    const bool fp8 = p->fp8_kv, trees_only = p->q_len > 1;
    const int32_t ratio = p->num_q_heads / p->num_kv_heads;
    if (!attn_ctm_supports_tree_query_seq_len(p->q_len))
        return attn_fail(log, user, ATTN_ERROR_UNSUPPORTED, "q_len is %d: trees have at most %d",
                         p->q_len, ATTN_CTM_MAX_TREE_QUERY_SEQ_LEN);
    if (!head_dim_ok(p->head_dim) || (trees_only && fp8 && p->head_dim == 32))
        return attn_fail(log, user, ATTN_ERROR_UNSUPPORTED,
                         "head_dim is %d: %s with %s keys and values is served at %s64, 128, 256 "
                         "and 512",
                         p->head_dim, trees_only ? "a tree" : "decode", fp8 ? "e4m3" : "fp16",
                         trees_only && fp8 ? "" : "32, ");
    if (ratio > ATTN_CTM_MAX_GQA_RATIO_R16)
        return attn_fail(log, user, ATTN_ERROR_UNSUPPORTED,
                         "num_q_heads is %d, num_kv_heads %d: that is %d query heads a KV head, "
                         "more than %d",
                         p->num_q_heads, p->num_kv_heads, ratio, ATTN_CTM_MAX_GQA_RATIO_R16);
    if (semaphores_of(p) < 0)
        return attn_fail(log, user, ATTN_ERROR_UNSUPPORTED,
                         "batch_size is %d, q_len %d, num_q_heads %d, num_kv_heads %d: that needs "
                         "more than %d semaphores",
                         p->batch_size, p->q_len, p->num_q_heads, p->num_kv_heads, INT32_MAX);
    return ATTN_OK;
}

static enum attn_status check_scalars(const struct attn_device *const device,
                                      const struct attn_ctm_params *const p)
{
    const int32_t mask_words = (p->q_len - 1) / MASK_WORD_BITS + 1;
    const int32_t table_length = p->skip_softmax_scale_table_length;
    REQUIRE(isfinite(p->attention_scale), "attention_scale is %g: it has to be finite",
            (double) p->attention_scale);
    REQUIRE(!p->fp8_kv || isfinite(p->k_scale), "k_scale is %g: it has to be finite",
            (double) p->k_scale);
    REQUIRE(!p->fp8_kv || isfinite(p->v_scale), "v_scale is %g: it has to be finite",
            (double) p->v_scale);
    REQUIRE(p->q_len == 1 || p->mask_words >= mask_words,
            "mask_words is %d: with q_len %d it has to be at least %d", p->mask_words, p->q_len,
            mask_words);
    REQUIRE(table_length >= 0 && table_length % 2 == 0,
            "skip_softmax_scale_table_length is %d: it counts int32, two for each pair",
            table_length);
    REQUIRE(p->skip_softmax_scale_table || table_length == 0,
            "skip_softmax_scale_table is NULL, but its length is %d", table_length);
    REQUIRE(p->q_len == 1 || table_length == 0,
            "skip_softmax_scale_table has %d int32, but q_len is %d: skip-softmax is for one query "
            "token a sequence",
            table_length, p->q_len);
    return ATTN_OK;
}

static int64_t words(const int64_t count)
{
    return attn_size_times(count, 4);
}

static enum attn_status check_buffers(const struct attn_device *const device,
                                      const struct attn_ctm_params *const p)
{
    const int64_t q_rows = attn_size_times((int64_t) p->batch_size * p->q_len, p->num_q_heads);
    const int64_t q_bytes = attn_size_times(q_rows, 2 * p->head_dim);
    const int64_t pool_slots = (int64_t) p->num_pages * 2 * ATTN_CTM_PAGE_SIZE;
    const int64_t pool_row = (int64_t) p->num_kv_heads * p->head_dim * (p->fp8_kv ? 1 : 2);
    const int64_t table = attn_size_times((int64_t) p->batch_size * 2, p->max_pages_per_seq);
    const int64_t mask = attn_size_times((int64_t) p->batch_size * p->q_len, p->mask_words);
    const bool tree = p->q_len > 1;
    const struct attn_buffer buffers[] = {
        { "q", p->q, q_bytes, ROW_ALIGNMENT, true, false },
        { "output", p->output, q_bytes, ROW_ALIGNMENT, true, true },
        { "kv_pool", p->kv_pool, attn_size_times(pool_slots, pool_row), ROW_ALIGNMENT, true,
          false },
        { "page_table", p->page_table, words(table), 4, true, false },
        { "seq_lens", p->seq_lens, words(p->batch_size), 4, true, false },
        { "sinks", p->sinks, words(p->num_q_heads), 4, false, false },
        { "tree_mask", tree ? p->tree_mask : NULL, tree ? words(mask) : 0, 4, tree, false },
        { "skip_softmax_scale_table", p->skip_softmax_scale_table,
          words(p->skip_softmax_scale_table_length), 4, false, false },
        { "workspace", p->workspace, words(workspace_of(p)), WORKSPACE_ALIGNMENT, true, true },
        { "semaphores", p->semaphores, words(semaphores_of(p)), 4, true, true },
        { "fault", p->fault, 4, 4, false, true },
        { "dropped_pages", p->dropped_pages, 8, 8, false, true },
    };
    return attn_buffers_check(device, buffers, sizeof(buffers) / sizeof(buffers[0]));
}

static enum attn_status check(const struct attn_device *const device,
                              const struct attn_ctm_params *const p)
{
    enum attn_status status = check_sizes(device, p);
    if (status == ATTN_OK) status = check_supported(device, p);
    if (status == ATTN_OK) status = check_scalars(device, p);
    // Nothing will be read or written: the pointers don't matter.
    if (status != ATTN_OK || p->batch_size == 0) return status;
    return check_buffers(device, p);
}

// ---- the call

static struct attn_decode_params fill_params(const struct attn_ctm_params *const p)
{
    struct attn_decode_params params = attn_reference_ctm(p);
    params.workspace = p->workspace;
    params.workspace_bytes = (size_t) workspace_of(p) * sizeof(*p->workspace);
    params.counters = p->semaphores;
    return params;
}

enum attn_status attn_ctm_run(struct attn_device *const device,
                              const struct attn_ctm_params *const params)
{
    attn_error_clear();
    ATTN_REQUIRE(NULL, NULL, device, "device is NULL");
    REQUIRE(params, "params is NULL");
    struct attn_ctm_params own;
    enum attn_status status =
        attn_params_copy(device->log, device->log_user, "params", &own, sizeof(own), params);
    if (status == ATTN_OK) status = check(device, &own);
    if (status != ATTN_OK) return status;
    const struct attn_decode_params decode = fill_params(&own);
    const struct attn_decode_limits limits = {
        .workspace_bytes = decode.workspace_bytes,
        .num_counters = (int32_t) semaphores_of(&own),
    };
    return attn_decode_run_within(device, &decode, &limits, own.stream);
}
