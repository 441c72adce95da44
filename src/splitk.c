/* SPDX-License-Identifier: Apache-2.0 */
#include "attn/splitk.h"

#include "env.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

// A piece of somebody's string, blanks around it left out.
struct word {
    const char *text;
    size_t length;
};

static bool is_blank(const char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static struct word trim(const char *text)
{
    if (!text) return (struct word){ "", 0 };
    while (is_blank(*text)) text++;
    size_t length = strlen(text);
    while (length > 0 && is_blank(text[length - 1])) length--;
    return (struct word){ text, length };
}

static bool is_word(const struct word word, const char *const known)
{
    return word.length == strlen(known) && strncasecmp(word.text, known, word.length) == 0;
}

// Digits only; any number of them: the value saturates at INT32_MAX.
static bool read_count(const struct word word, int32_t *const count)
{
    int64_t value = 0;
    for (size_t i = 0; i < word.length; i++) {
        if (word.text[i] < '0' || word.text[i] > '9') return false;
        value = value * 10 + (word.text[i] - '0');
        if (value > INT32_MAX) value = INT32_MAX;
    }
    *count = (int32_t) value;
    return word.length > 0;
}

static int32_t clamp(const int64_t value, const int32_t low, const int32_t high)
{
    return value < low ? low : value > high ? high : (int32_t) value;
}

static int32_t at_least_one(const int32_t value)
{
    return value < 1 ? 1 : value;
}

static bool read_chunk(const struct word word, int32_t *const keys)
{
    static const char prefix[] = "chunk:";
    const size_t length = sizeof(prefix) - 1;
    if (word.length <= length || strncasecmp(word.text, prefix, length) != 0) return false;
    int32_t n;
    if (!read_count((struct word){ word.text + length, word.length - length }, &n)) return false;
    if (n < ATTN_SPLITK_MIN_CHUNK || n > ATTN_SPLITK_MAX_CHUNK || (n & (n - 1)) != 0) return false;
    *keys = n;
    return true;
}

bool attn_splitk_parse(const char *const text, struct attn_splitk_policy *const policy)
{
    const struct word word = trim(text);
    int32_t count;
    if (is_word(word, "legacy"))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_LEGACY, 0 };
    else if (is_word(word, "auto"))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_AUTO, 0 };
    else if (is_word(word, "chunk"))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_CHUNK, 0 };
    else if (read_chunk(word, &count))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_CHUNK, count };
    else if (is_word(word, "off") || is_word(word, "false") || is_word(word, "no"))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_PINNED, 1 };
    else if (read_count(word, &count))
        *policy = (struct attn_splitk_policy){ ATTN_SPLITK_PINNED,
                                               clamp(count, 1, ATTN_MAX_DECODE_SPLITS) };
    else
        return false;
    return true;
}

int attn_splitk_format(const struct attn_splitk_policy policy, char *const text, const size_t size)
{
    switch (policy.kind) {
    case ATTN_SPLITK_AUTO: return snprintf(text, size, "auto");
    case ATTN_SPLITK_PINNED: return snprintf(text, size, "%d", policy.count);
    case ATTN_SPLITK_CHUNK:
        if (policy.count == 0) return snprintf(text, size, "chunk");
        return snprintf(text, size, "chunk:%d", policy.count);
    case ATTN_SPLITK_LEGACY: break;
    }
    return snprintf(text, size, "legacy");
}

struct attn_splitk_policy attn_splitk_resolve_policy(const char *const declared,
                                                     const char *const env)
{
    struct attn_splitk_policy policy = { ATTN_SPLITK_LEGACY, 0 };
    if (!attn_splitk_parse(env, &policy)) attn_splitk_parse(declared, &policy);
    return policy;
}

struct attn_splitk_policy attn_splitk_policy_from_env(const char *const declared)
{
    return attn_splitk_resolve_policy(declared, attn_env(ATTN_ENV_SPLITK));
}

int32_t attn_splitk_auto_splits(const int32_t sm_count, const int32_t num_q_heads)
{
    const int64_t heads = at_least_one(num_q_heads);
    const int64_t blocks = (int64_t) ATTN_SPLITK_TARGET_WAVES * (sm_count < 0 ? 0 : sm_count);
    return clamp((blocks + heads - 1) / heads, 1, ATTN_MAX_DECODE_SPLITS);
}

int32_t attn_splitk_ref_seqs(const int32_t num_seqs, const int32_t max_decode_seqs)
{
    return num_seqs > max_decode_seqs ? num_seqs : max_decode_seqs;
}

int32_t attn_splitk_legacy_splits(const int32_t sm_count, const int32_t num_q_heads,
                                  const int32_t ref_seqs)
{
    const int64_t ctas = (int64_t) at_least_one(num_q_heads) * at_least_one(ref_seqs);
    return ctas >= sm_count ? 1 : (int32_t) (sm_count / ctas);
}

int32_t attn_splitk_num_splits(const struct attn_splitk_policy policy, const int32_t sm_count,
                               const int32_t num_q_heads, const int32_t num_seqs,
                               const int32_t max_decode_seqs)
{
    switch (policy.kind) {
    case ATTN_SPLITK_AUTO: return attn_splitk_auto_splits(sm_count, num_q_heads);
    case ATTN_SPLITK_PINNED: return clamp(policy.count, 1, ATTN_MAX_DECODE_SPLITS);
    case ATTN_SPLITK_CHUNK: return 0;
    case ATTN_SPLITK_LEGACY: break;
    }
    return attn_splitk_legacy_splits(sm_count, num_q_heads,
                                     attn_splitk_ref_seqs(num_seqs, max_decode_seqs));
}

int64_t attn_splitk_workspace_slots(const struct attn_splitk_policy policy, const int32_t sm_count,
                                    const int32_t num_q_heads, const int32_t rows)
{
    if (rows < 1 || num_q_heads < 1 || policy.kind == ATTN_SPLITK_CHUNK) return 0;
    if (policy.kind != ATTN_SPLITK_AUTO && policy.kind != ATTN_SPLITK_PINNED)
        return at_least_one(sm_count);
    int64_t slots = (int64_t) rows * num_q_heads;
    const int32_t splits = attn_splitk_num_splits(policy, sm_count, num_q_heads, 0, 0);
    return __builtin_mul_overflow(slots, splits, &slots) ? INT64_MAX : slots;
}

int64_t attn_splitk_workspace_bytes(const int64_t slots, const int32_t head_dim)
{
    if (slots < 1 || head_dim < 1) return 0;
    const int64_t slot_bytes = ((int64_t) head_dim + 2) * (int64_t) sizeof(float);
    int64_t bytes;
    return __builtin_mul_overflow(slots, slot_bytes, &bytes) ? INT64_MAX : bytes;
}

bool attn_gqa_pack_parse(const char *const text, bool *const on)
{
    const struct word word = trim(text);
    const bool yes =
        is_word(word, "1") || is_word(word, "on") || is_word(word, "true") || is_word(word, "yes");
    const bool no =
        is_word(word, "0") || is_word(word, "off") || is_word(word, "false") || is_word(word, "no");
    if (yes || no) *on = yes;
    return yes || no;
}

bool attn_gqa_pack_resolve(const bool declared, const char *const env)
{
    bool on = declared;
    attn_gqa_pack_parse(env, &on);
    return on;
}

bool attn_gqa_pack_enabled(const bool declared)
{
    return attn_gqa_pack_resolve(declared, attn_env(ATTN_ENV_GQA_PACK));
}

bool attn_gqa_pack_shape_ok(const int32_t num_q_heads, const int32_t num_kv_heads,
                            const int32_t head_dim)
{
    return num_kv_heads > 0 && head_dim == ATTN_DECODE_GQA_PACK_HEAD_DIM &&
           num_q_heads == (int64_t) ATTN_DECODE_GQA_PACK_WIDTH * num_kv_heads;
}

int64_t attn_gqa_pack_ctas(const int32_t num_kv_heads, const int32_t num_seqs)
{
    return num_kv_heads < 1 || num_seqs < 1 ? 0 : (int64_t) num_kv_heads * num_seqs;
}
