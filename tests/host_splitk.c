/* SPDX-License-Identifier: Apache-2.0 */
// include/attn/splitk.h, function by function. The expected values are the contract's.
#include "attn/splitk.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const int32_t hostile[] = { INT32_MIN, -1, 0, 1, 2, 132, INT32_MAX - 1, INT32_MAX };
#define NUM_HOSTILE (sizeof(hostile) / sizeof(hostile[0]))

Test(splitk, parses_what_the_header_lists)
{
    static const struct {
        const char *text;
        enum attn_splitk_kind kind;
        int32_t count;
    } cases[] = {
        { "legacy", ATTN_SPLITK_LEGACY, 0 },
        { "auto", ATTN_SPLITK_AUTO, 0 },
        { " \tAuTo\n", ATTN_SPLITK_AUTO, 0 },
        { "LEGACY ", ATTN_SPLITK_LEGACY, 0 },
        { "0", ATTN_SPLITK_PINNED, 1 },
        { "off", ATTN_SPLITK_PINNED, 1 },
        { "False", ATTN_SPLITK_PINNED, 1 },
        { "NO", ATTN_SPLITK_PINNED, 1 },
        { "1", ATTN_SPLITK_PINNED, 1 },
        { "7", ATTN_SPLITK_PINNED, 7 },
        { "007", ATTN_SPLITK_PINNED, 7 },
        { "16", ATTN_SPLITK_PINNED, 16 },
        { "17", ATTN_SPLITK_PINNED, 16 },
        { "4294967297", ATTN_SPLITK_PINNED, 16 },
        { "99999999999999999999999999999999999999", ATTN_SPLITK_PINNED, 16 },
        { "chunk", ATTN_SPLITK_CHUNK, 0 },
        { "Chunk:64", ATTN_SPLITK_CHUNK, 64 },
        { "chunk:65536", ATTN_SPLITK_CHUNK, 65536 },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attn_splitk_policy policy = { ATTN_SPLITK_AUTO, -5 };
        cr_expect(attn_splitk_parse(cases[i].text, &policy), "'%s'", cases[i].text);
        cr_expect_eq(policy.kind, cases[i].kind, "'%s' gives kind %d", cases[i].text, policy.kind);
        cr_expect_eq(policy.count, cases[i].count, "'%s' gives count %d", cases[i].text,
                     policy.count);
    }
}

Test(splitk, refuses_anything_else_and_leaves_the_policy)
{
    static const char *const cases[] = {
        NULL,        "",          "  ",
        "-1",        "+1",        "1.5",
        "1x",        "x1",        "0x10",
        "auto1",     "aut",       "legacy,",
        "chunk:",    "chunk:0",   "chunk:32",
        "chunk:63",  "chunk:96",  "chunk:131072",
        "chunk:-64", "chunk: 64", "chunk:18446744073709551680",
        "chunk64",   "1 2",       "on",
        "yes",       "true",
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attn_splitk_policy policy = { ATTN_SPLITK_PINNED, 9 };
        cr_expect_not(attn_splitk_parse(cases[i], &policy), "'%s'", cases[i] ? cases[i] : "NULL");
        cr_expect(policy.kind == ATTN_SPLITK_PINNED && policy.count == 9);
    }
}

Test(splitk, formats_what_it_parses)
{
    static const char *const cases[] = { "legacy", "auto",     "1",          "16",
                                         "chunk",  "chunk:64", "chunk:65536" };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attn_splitk_policy policy;
        char text[32];
        cr_assert(attn_splitk_parse(cases[i], &policy));
        cr_expect_eq(attn_splitk_format(policy, text, sizeof(text)), (int) strlen(cases[i]));
        cr_expect_str_eq(text, cases[i]);
        cr_expect_eq(attn_splitk_format(policy, NULL, 0), (int) strlen(cases[i]));
    }
}

Test(splitk, resolves_environment_before_declaration)
{
    static const struct {
        const char *declared, *env;
        enum attn_splitk_kind kind;
        int32_t count;
    } cases[] = {
        { "chunk", "4", ATTN_SPLITK_PINNED, 4 },     { "chunk", "nonsense", ATTN_SPLITK_CHUNK, 0 },
        { "chunk", NULL, ATTN_SPLITK_CHUNK, 0 },     { "nonsense", "auto", ATTN_SPLITK_AUTO, 0 },
        { "nonsense", "-1", ATTN_SPLITK_LEGACY, 0 }, { NULL, NULL, ATTN_SPLITK_LEGACY, 0 },
        { "auto", "", ATTN_SPLITK_AUTO, 0 },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct attn_splitk_policy policy =
            attn_splitk_resolve_policy(cases[i].declared, cases[i].env);
        cr_expect(policy.kind == cases[i].kind && policy.count == cases[i].count, "case %zu", i);
    }
}

Test(splitk, reads_the_environment)
{
    setenv("METRALE_ATTN_DECODE_SPLITK", "3", 1);
    setenv("METRALE_ATTN_DECODE_GQA_PACK", "on", 1);
    cr_expect_eq(attn_splitk_policy_from_env("auto").count, 3);
    cr_expect(attn_gqa_pack_enabled(false));
    unsetenv("METRALE_ATTN_DECODE_SPLITK");
    unsetenv("METRALE_ATTN_DECODE_GQA_PACK");
    cr_expect_eq(attn_splitk_policy_from_env("auto").kind, ATTN_SPLITK_AUTO);
    cr_expect_not(attn_gqa_pack_enabled(false));
}

Test(splitk, counts_splits_as_listed)
{
    static const int32_t automatic[][3] = {
        { 132, 24, 11 }, { 148, 24, 13 },      { 48, 24, 4 },       { 132, 512, 1 },
        { 132, 1, 16 },  { 148, 16, 16 },      { 148, 32, 10 },     { 148, 64, 5 },
        { 0, 24, 1 },    { 132, 0, 16 },       { -1, 24, 1 },       { 0, 0, 1 },
        { 132, -3, 16 }, { INT32_MAX, 1, 16 }, { 1, INT32_MAX, 1 }, { INT32_MAX, INT32_MAX, 2 },
    };
    for (size_t i = 0; i < sizeof(automatic) / sizeof(automatic[0]); i++)
        cr_expect_eq(attn_splitk_auto_splits(automatic[i][0], automatic[i][1]), automatic[i][2],
                     "auto(%d, %d)", automatic[i][0], automatic[i][1]);
    static const int32_t legacy[][4] = {
        { 48, 8, 1, 6 },
        { 48, 8, 6, 1 },
        { 48, 24, 16, 1 },
        { 132, 24, 1, 5 },
        { 132, 1, 1, 132 },
        { 0, 8, 1, 1 },
        { -5, 8, 1, 1 },
        { 48, 0, 0, 48 },
        { 48, INT32_MAX, INT32_MAX, 1 },
        { INT32_MAX, 1, 1, INT32_MAX },
        { INT32_MAX, 65536, 65536, 1 },
    };
    for (size_t i = 0; i < sizeof(legacy) / sizeof(legacy[0]); i++)
        cr_expect_eq(attn_splitk_legacy_splits(legacy[i][0], legacy[i][1], legacy[i][2]),
                     legacy[i][3], "legacy(%d, %d, %d)", legacy[i][0], legacy[i][1], legacy[i][2]);
    cr_expect_eq(attn_splitk_ref_seqs(3, 8), 8);
    cr_expect_eq(attn_splitk_ref_seqs(8, 3), 8);
    cr_expect_eq(attn_splitk_ref_seqs(-2, -1), -1);
}

Test(splitk, reads_sequence_counts_under_legacy_only)
{
    const struct attn_splitk_policy automatic = { ATTN_SPLITK_AUTO, 0 },
                                    five = { ATTN_SPLITK_PINNED, 5 };
    const struct attn_splitk_policy chunk = { ATTN_SPLITK_CHUNK, 128 },
                                    legacy = { ATTN_SPLITK_LEGACY, 0 };
    for (size_t i = 0; i < NUM_HOSTILE; i++) {
        for (size_t j = 0; j < NUM_HOSTILE; j++) {
            cr_expect_eq(attn_splitk_num_splits(automatic, 132, 24, hostile[i], hostile[j]), 11);
            cr_expect_eq(attn_splitk_num_splits(five, 132, 24, hostile[i], hostile[j]), 5);
            cr_expect_eq(attn_splitk_num_splits(chunk, 132, 24, hostile[i], hostile[j]), 0);
        }
    }
    cr_expect_eq(attn_splitk_num_splits(legacy, 48, 8, 1, 6), 1);
    cr_expect_eq(attn_splitk_num_splits(legacy, 48, 8, 1, 1), 6);
    // A policy that no parser made.
    cr_expect_eq(attn_splitk_num_splits((struct attn_splitk_policy){ ATTN_SPLITK_PINNED,
                                                                     INT32_MAX },
                                        1, 1, 1, 1),
                 ATTN_MAX_DECODE_SPLITS);
    cr_expect_eq(attn_splitk_num_splits((struct attn_splitk_policy){ ATTN_SPLITK_PINNED, -7 }, 1, 1,
                                        1, 1),
                 1);
}

Test(splitk, sizes_the_workspace_as_listed)
{
    const struct attn_splitk_policy automatic = { ATTN_SPLITK_AUTO, 0 },
                                    two = { ATTN_SPLITK_PINNED, 2 };
    const struct attn_splitk_policy chunk = { ATTN_SPLITK_CHUNK, 0 },
                                    legacy = { ATTN_SPLITK_LEGACY, 0 };
    cr_expect_eq(attn_splitk_workspace_slots(automatic, 132, 24, 32), 32 * 24 * 11);
    cr_expect_eq(attn_splitk_workspace_slots(two, 132, 24, 1), 48);
    cr_expect_eq(attn_splitk_workspace_slots(chunk, 132, 24, 32), 0);
    cr_expect_eq(attn_splitk_workspace_slots(legacy, 48, 24, 32), 48);
    cr_expect_eq(attn_splitk_workspace_slots(legacy, 0, 24, 32), 1);
    cr_expect_eq(attn_splitk_workspace_slots(legacy, -9, 24, 32), 1);
    cr_expect_eq(attn_splitk_workspace_slots(automatic, 132, 0, 32), 0);
    cr_expect_eq(attn_splitk_workspace_slots(automatic, 132, 24, -1), 0);
    cr_expect_eq(attn_splitk_workspace_slots(two, 132, INT32_MAX, INT32_MAX),
                 2 * ((int64_t) INT32_MAX * INT32_MAX));
    cr_expect_eq(attn_splitk_workspace_slots((struct attn_splitk_policy){ ATTN_SPLITK_PINNED, 16 },
                                             132, INT32_MAX, INT32_MAX),
                 INT64_MAX);
    cr_expect_eq(attn_splitk_workspace_bytes(48, 256), 48 * 258 * 4);
    cr_expect_eq(attn_splitk_workspace_bytes(INT64_MAX, 1), INT64_MAX);
    cr_expect_eq(attn_splitk_workspace_bytes(1, INT32_MAX), ((int64_t) INT32_MAX + 2) * 4);
    cr_expect_eq(attn_splitk_workspace_bytes(0, 256), 0);
    cr_expect_eq(attn_splitk_workspace_bytes(-1, 256), 0);
    cr_expect_eq(attn_splitk_workspace_bytes(1, 0), 0);
    cr_expect_eq(attn_splitk_workspace_bytes(INT64_MIN, INT32_MIN), 0);
}

// What attn_decode relies on where it cuts sequences: pieces have room.
Test(splitk, has_a_slot_for_each_piece)
{
    static const char *const policies[] = { "legacy", "auto", "2", "16" };
    static const int32_t sms[] = { 1, 7, 48, 132, 148, 1000 };
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        struct attn_splitk_policy policy;
        cr_assert(attn_splitk_parse(policies[i], &policy));
        for (size_t j = 0; j < sizeof(sms) / sizeof(sms[0]); j++)
            for (int32_t heads = 1; heads <= 160; heads++)
                for (int32_t most = 1; most <= 64; most++)
                    for (int32_t rows = 1; rows <= most; rows += rows < 3 ? 1 : 9) {
                        const int32_t splits =
                            attn_splitk_num_splits(policy, sms[j], heads, rows, most);
                        const int64_t slots =
                            attn_splitk_workspace_slots(policy, sms[j], heads, rows);
                        cr_assert(splits == 1 || (int64_t) rows * heads * splits <= slots,
                                  "%s, %d SMs: %d x %d heads x %d pieces, %lld slots", policies[i],
                                  sms[j], rows, heads, splits, (long long) slots);
                    }
    }
}

// Defined for every argument; the sanitizers of the CI see an overflow or a division by zero.
Test(splitk, stays_in_range_for_hostile_arguments)
{
    for (int kind = -1; kind <= 4; kind++) {
        for (size_t i = 0; i < NUM_HOSTILE * NUM_HOSTILE * NUM_HOSTILE * NUM_HOSTILE; i++) {
            const int32_t a = hostile[i % NUM_HOSTILE], b = hostile[i / 8 % NUM_HOSTILE];
            const int32_t c = hostile[i / 64 % NUM_HOSTILE], d = hostile[i / 512];
            const struct attn_splitk_policy policy = { (enum attn_splitk_kind) kind, a };
            const int32_t splits = attn_splitk_num_splits(policy, a, b, c, d);
            const int64_t slots = attn_splitk_workspace_slots(policy, a, b, c);
            if (splits < 0 || (kind != ATTN_SPLITK_CHUNK && splits < 1) || slots < 0 ||
                attn_splitk_workspace_bytes(slots, d) < 0)
                cr_assert_fail("kind %d, %d %d %d %d: %d splits, %lld slots", kind, a, b, c, d,
                               splits, (long long) slots);
        }
    }
}

Test(gqa_pack, parses_and_resolves)
{
    static const char *const yes[] = { "1", "on", "TRUE", " yes " };
    static const char *const no[] = { "0", "off", "False", "\tno\n" };
    static const char *const neither[] = { NULL, "", "2", "01", "o n", "-1", "enable" };
    bool on = false;
    for (size_t i = 0; i < 4; i++) {
        cr_expect(attn_gqa_pack_parse(yes[i], &on) && on, "'%s'", yes[i]);
        cr_expect(attn_gqa_pack_parse(no[i], &on) && !on, "'%s'", no[i]);
        cr_expect(attn_gqa_pack_resolve(false, yes[i]));
        cr_expect_not(attn_gqa_pack_resolve(true, no[i]));
    }
    for (size_t i = 0; i < sizeof(neither) / sizeof(neither[0]); i++) {
        on = true;
        cr_expect(!attn_gqa_pack_parse(neither[i], &on) && on);
        cr_expect(attn_gqa_pack_resolve(true, neither[i]));
        cr_expect_not(attn_gqa_pack_resolve(false, neither[i]));
    }
}

Test(gqa_pack, knows_its_shape)
{
    cr_expect(attn_gqa_pack_shape_ok(24, 4, 256));
    cr_expect(attn_gqa_pack_shape_ok(6, 1, 256));
    cr_expect_not(attn_gqa_pack_shape_ok(25, 4, 256));
    cr_expect_not(attn_gqa_pack_shape_ok(24, 4, 128));
    cr_expect_not(attn_gqa_pack_shape_ok(0, 0, 256));
    cr_expect_not(attn_gqa_pack_shape_ok(-6, -1, 256));
    cr_expect_not(attn_gqa_pack_shape_ok(24, 0, 256));
    // 6 * 715827883 is 2 beyond 2^32.
    cr_expect_not(attn_gqa_pack_shape_ok(2, 715827883, 256));
    cr_expect_eq(attn_gqa_pack_ctas(4, 12), 48);
    cr_expect_eq(attn_gqa_pack_ctas(0, 12), 0);
    cr_expect_eq(attn_gqa_pack_ctas(4, -1), 0);
    cr_expect_eq(attn_gqa_pack_ctas(INT32_MAX, INT32_MAX), (int64_t) INT32_MAX * INT32_MAX);
}
