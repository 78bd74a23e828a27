/* The tree of a step and which of its segments are kept: what Planner in ramet.kernels.plan defines, 256 rows in a
 * few microseconds. */
#include <stdlib.h>

#include "python.h"

/* A longest run of rows [row0, row1) that share blocks up to block1. */
typedef struct {
    int64_t row0, row1, block1;
} Interval;

/* As in ramet.kernels.plan. */
typedef struct {
    int64_t level, row0, row1, block0, block1;
} Segment;

/* For S rows: what the plans of a tree have in common. */
typedef struct {
    int64_t *query_lens;     /* [S] */
    int64_t *query_starts;   /* [S + 1] */
    int64_t *private_block0; /* [S] */
    int64_t *least_kv_lens;  /* [S] with which each row sees all that it shares; beyond any if one does not now */
    Segment *segments;       /* [S - 1] at most */
} Tree;

/* Read the rows, and how many blocks each shares with the one before it: [S + 1], of which the last is 0. Returns 0,
 * or -1 with an exception. */
static int read_rows(Tree *tree, int64_t *common, PyObject *query_lens, PyObject *num_shared_blocks,
                     const int64_t *kv_lens, int64_t num_rows)
{
    tree->query_starts[0] = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t queries = tree->query_lens[i] = int_of(PyList_GetItem(query_lens, i));
        common[i] = queries < 0 ? -1 : int_of(PyList_GetItem(num_shared_blocks, i));
        if (common[i] < 0)
            return -1;
        const char *nonsense = i == 0 && common[i] > 0   ? "the first row has no row before it"
                               : queries < 1             ? "a row has at least one query"
                               : kv_lens[i] < queries    ? "a row has more queries than KV"
                               : kv_lens[i] > MAX_NUMBER ? "a row has more than 2^30 tokens"
                                                         : NULL;
        if (nonsense) {
            PyErr_SetString(PyExc_AssertionError, nonsense);
            return -1;
        }
        tree->query_starts[i + 1] = tree->query_starts[i] + queries;
    }
    common[num_rows] = 0;
    return 0;
}

/* Turn what neighbours have in common into what they can share: a block only if every query of both sees all of it. */
static void find_depths(Tree *tree, int64_t *depths, const int64_t *kv_lens, int64_t num_rows, int32_t block_size)
{
    int64_t seen_before = 0, sees_all = 1;
    for (int64_t i = 0; i < num_rows; i++) {
        int64_t deepest = depths[i] > depths[i + 1] ? depths[i] : depths[i + 1];
        tree->least_kv_lens[i] = (deepest > 0 ? deepest * block_size : 1) + tree->query_lens[i] - 1;
        sees_all &= kv_lens[i] >= tree->least_kv_lens[i];
        int32_t seen = (int32_t)(kv_lens[i] - tree->query_lens[i] + 1) / block_size;
        depths[i] = depths[i] < seen ? depths[i] : seen;
        depths[i] = depths[i] < seen_before ? depths[i] : seen_before;
        seen_before = seen;
    }
    if (!sees_all)
        tree->least_kv_lens[0] = INT64_MAX;
}

/* The inner nodes of the tree, each behind those below it. Only where the depth changes one can open or close. */
static int64_t find_intervals(const int64_t *depths, int64_t num_rows, Interval *open, Interval *found)
{
    int64_t num_open = 0, num_found = 0;
    for (int64_t i = 1; i <= num_rows; i++) {
        int64_t row0 = i - 1;
        while (num_open > 0 && open[num_open - 1].block1 > depths[i]) {
            Interval closed = open[--num_open];
            row0 = closed.row0;
            closed.row1 = i;
            found[num_found++] = closed;
        }
        if (depths[i] > (num_open > 0 ? open[num_open - 1].block1 : 0))
            open[num_open++] = (Interval){.row0 = row0, .block1 = depths[i]};
    }
    return num_found;
}

/* Keep the intervals that pay. The blocks of the others go to what lies below them: private_block0 of its first row
 * is what those around an interval have taken already. Returns how many are kept, from right to left. */
static int64_t keep(const Interval *found, int64_t num_found, int64_t least_blocks, int64_t *levels,
                    int64_t *private_block0, Segment *kept)
{
    int64_t num_kept = 0;
    for (int64_t i = num_found - 1; i >= 0; i--) {
        Interval it = found[i];
        int64_t level = levels[it.row0], block0 = private_block0[it.row0];
        if ((it.block1 - block0) * (it.row1 - it.row0 - 1) < least_blocks)
            continue;
        kept[num_kept++] = (Segment){level, it.row0, it.row1, block0, it.block1};
        for (int64_t row = it.row0; row < it.row1; row++) {
            private_block0[row] = it.block1;
            levels[row] = level + 1;
        }
    }
    return num_kept;
}

/* By level, then from left to right. `ends` [num_kept + 1] is scratch. */
static void sort_by_level(const Segment *kept, int64_t num_kept, int64_t *ends, Segment *sorted)
{
    for (int64_t i = 0; i <= num_kept; i++)
        ends[i] = 0;
    for (int64_t i = 0; i < num_kept; i++)
        ends[kept[i].level]++;
    for (int64_t i = 1; i < num_kept; i++)
        ends[i] += ends[i - 1];
    for (int64_t i = 0; i < num_kept; i++)
        sorted[--ends[kept[i].level]] = kept[i];
}

/* Fold the tree of S rows; query_lens and num_shared_blocks are lists of S numbers. A segment saves least_blocks
 * at least. `out` [9 S] gets the arrays of Tree, one behind the other. Returns the number of segments, or
 * -1 with an exception. */
int64_t ramet_fold(PyObject *query_lens, PyObject *num_shared_blocks, const int64_t *kv_lens, int64_t num_rows,
                   int64_t block_size, int64_t least_blocks, int64_t *out)
{
    int64_t S = num_rows;
    Tree tree = {out, out + S, out + 2 * S + 1, out + 3 * S + 1, (Segment *)(out + 4 * S + 1)};
    Interval *open = malloc(S * (2 * sizeof(Interval) + sizeof(Segment) + 2 * sizeof(int64_t)) + sizeof(int64_t));
    if (!open) {
        PyErr_NoMemory();
        return -1;
    }
    Interval *found = open + S;
    Segment *kept = (Segment *)(found + S);
    int64_t *depths = (int64_t *)(kept + S), *levels = depths + S + 1, num_kept = -1;
    if (read_rows(&tree, depths, query_lens, num_shared_blocks, kv_lens, S) == 0) {
        find_depths(&tree, depths, kv_lens, S, block_size);
        int64_t num_found = find_intervals(depths, S, open, found);
        for (int64_t i = 0; i < S; i++)
            levels[i] = tree.private_block0[i] = 0;
        num_kept = keep(found, num_found, least_blocks, levels, tree.private_block0, kept);
        sort_by_level(kept, num_kept, depths, tree.segments);
    }
    free(open);
    return num_kept;
}
