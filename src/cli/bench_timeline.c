/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bench_timeline.h"

#include "cli/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct span {
    double start, end;
};

// Rows of the picture. Reads of a tile begin before those of the tile before have ended: neighbours
// have rows of their own, as many as there are planes.
enum {
    ROW_COMPUTE,
    ROW_COPIES,
    ROW_READS,
};

static struct span reads_of(const struct attn_swap_tile *const tile)
{
    return (struct span){ tile->read_start, tile->read_end };
}

static struct span copies_of(const struct attn_swap_tile *const tile)
{
    return (struct span){ tile->copy_start, tile->copy_end };
}

static struct span compute_of(const struct attn_swap_tile *const tile)
{
    return (struct span){ tile->compute_start, tile->compute_end };
}

// ---- what runs at a time

static int compare_starts(const void *const a, const void *const b)
{
    const double first = ((const struct span *) a)->start;
    const double second = ((const struct span *) b)->start;
    return (first > second) - (first < second);
}

// Sorts spans, and joins those that overlap. Returns how many are left.
static int32_t join_spans(struct span *const spans, const int32_t count)
{
    int32_t joined = 0;
    qsort(spans, (size_t) count, sizeof(*spans), compare_starts);
    for (int32_t i = 0; i < count; i++) {
        struct span *const last = &spans[joined > 0 ? joined - 1 : 0];
        if (joined == 0 || spans[i].start > last->end)
            spans[joined++] = spans[i];
        else if (spans[i].end > last->end)
            last->end = spans[i].end;
    }
    return joined;
}

static double count_common(const struct span *const one, const struct span *const spans,
                           const int32_t count)
{
    double common = 0;
    for (int32_t i = 0; i < count && spans[i].start < one->end; i++) {
        const double start = one->start > spans[i].start ? one->start : spans[i].start;
        const double end = one->end < spans[i].end ? one->end : spans[i].end;
        if (end > start) common += end - start;
    }
    return common;
}

// Tiles that bring nothing hide nothing. A tile's own copies are past when it is computed.
static double find_hidden(const struct attn_swap_tile *const tiles, const int32_t count,
                          struct span *const spans)
{
    double all = 0, hidden = 0;
    int32_t num_spans = 0;
    for (int32_t i = 0; i < count; i++)
        if (tiles[i].bytes > 0) spans[num_spans++] = copies_of(&tiles[i]);
    num_spans = join_spans(spans, num_spans);
    for (int32_t i = 0; i < count; i++) {
        const struct span compute = compute_of(&tiles[i]);
        all += compute.end - compute.start;
        hidden += count_common(&compute, spans, num_spans);
    }
    return all > 0 ? hidden / all : 0;
}

// ---- the file

static json_t *name_row(const int row, const char *const name)
{
    return json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", "thread_name", "ph", "M", "pid", 1,
                     "tid", row, "args", "name", name);
}

static json_t *describe_span(const struct attn_swap_tile *const tile, const char *const category,
                             const int row, const struct span span)
{
    char name[48];
    snprintf(name, sizeof(name), "tile %llu", (unsigned long long) tile->number);
    return json_pack("{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:{s:i, s:I}}", "name", name, "cat",
                     category, "ph", "X", "ts", span.start, "dur", span.end - span.start, "pid", 1,
                     "tid", row, "args", "layer", (int) tile->layer, "bytes",
                     (json_int_t) tile->bytes);
}

static json_t *describe_tiles(const struct attn_swap_tile *const tiles, const int32_t count,
                              const int32_t num_planes, const double hidden)
{
    json_t *const events = json_array();
    json_array_append_new(events, name_row(ROW_COMPUTE, "compute"));
    json_array_append_new(events, name_row(ROW_COPIES, "copies"));
    for (int32_t i = 0; i < num_planes; i++)
        json_array_append_new(events, name_row(ROW_READS + i, "reads"));
    for (int32_t i = 0; i < count; i++) {
        const struct attn_swap_tile *const tile = &tiles[i];
        const int row = ROW_READS + (int) (tile->number % (uint64_t) num_planes);
        json_array_append_new(events,
                              describe_span(tile, "compute", ROW_COMPUTE, compute_of(tile)));
        json_array_append_new(events, describe_span(tile, "copies", ROW_COPIES, copies_of(tile)));
        if (tile->read_end > 0)
            json_array_append_new(events, describe_span(tile, "reads", row, reads_of(tile)));
    }
    return json_pack("{s:o, s:s, s:{s:s, s:f}}", "traceEvents", events, "displayTimeUnit", "ms",
                     "otherData", "library", attn_version(), "compute_hidden_share", hidden);
}

static int write_document(const char *const path, json_t *const document)
{
    const int failed = !document || json_dump_file(document, path, JSON_COMPACT);
    const int error = errno;
    json_decref(document);
    return failed ? cli_fail("%s cannot be written: %s", path, strerror(error)) : CLI_FINE;
}

int timeline_write(const char *const path, const struct attn_swap *const swap, const int32_t count,
                   double *const hidden)
{
    struct attn_swap_info info = { .size = sizeof(info) };
    struct attn_swap_tile *const tiles = calloc((size_t) count + 1, sizeof(*tiles));
    struct span *const spans = calloc((size_t) count + 1, sizeof(*spans));
    int result = tiles && spans ? CLI_FINE : cli_fail("out of memory");
    if (!result && attn_swap_describe(swap, &info) != ATTN_OK) result = cli_fail_library();
    for (int32_t i = 0; !result && i < count; i++) {
        tiles[i].size = sizeof(tiles[i]);
        if (attn_swap_get_tile(swap, count - 1 - i, &tiles[i]) != ATTN_OK)
            result = cli_fail_library();
    }
    if (!result) *hidden = find_hidden(tiles, count, spans);
    if (!result)
        result = write_document(path, describe_tiles(tiles, count, info.num_planes, *hidden));
    free(tiles);
    free(spans);
    return result;
}
