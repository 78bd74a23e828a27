/* One step: its lists, block ids and lengths, and which of them the card has to be sent. */
#include <stdlib.h>
#include <string.h>

#include "lists.h"

/* What has changed since the step before. */
enum { LENGTHS, IDS, ALL, OUTGROWN };

/* Returns 0, or -1 with an exception. */
static int check(const Step *step)
{
    int64_t num_rows = PyList_Size(step->tables), last = -1;
    for (int64_t i = 0; i < step->num_rows; i++) {
        int64_t row = step->rows[i];
        if (row <= last || row >= num_rows) {
            PyErr_SetString(PyExc_ValueError, "rows are those of the plan, in order");
            return -1;
        }
        if (step->kv_lens[row] < 1 || step->kv_lens[row] > MAX_NUMBER || step->query_starts[row] > MAX_NUMBER) {
            PyErr_SetString(PyExc_ValueError, "a row has 1 to 2^30 tokens, and a step has no more queries");
            return -1;
        }
        last = row;
    }
    return 0;
}

static void write_kv_lens(const Lists *lists, const Step *step)
{
    int32_t *kv_lens = section(lists, KV_LENS);
    for (int64_t i = 0; i < step->num_rows; i++)
        kv_lens[i] = step->kv_lens[step->rows[i]];
}

static int fits(const Lists *lists)
{
    for (int i = 0; i < NUM_SECTIONS; i++)
        if (lists->needed[i] > lists->buffer->starts[i + 1] - lists->buffer->starts[i])
            return 0;
    return 1;
}

/* The ids of a new tree, with those that the tree before had. */
static int write_new_ids(const Lists *lists, Tree *tree, const Tree *before, const Step *step)
{
    if (!before)
        return write_ids(lists, tree, NULL, NULL, step);
    int32_t *from = malloc(before->num_ids * sizeof *from); /* they lie where the new ones go */
    if (!from) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(from, section(lists, BLOCK_IDS), before->num_ids * sizeof *from);
    int result = write_ids(lists, tree, before, from, step);
    free(from);
    return result;
}

static int64_t prepare_new(Lists *lists, const Step *step, int knows_ids)
{
    Tree *tree = make_tree(lists, step);
    if (!tree)
        return -1;
    if (!fits(lists)) {
        free(tree);
        return OUTGROWN;
    }
    int result = write_new_ids(lists, tree, knows_ids ? lists->tree : NULL, step);
    if (result < 0) {
        free(tree);
        return -1;
    }
    free(lists->tree);
    lists->tree = tree;
    write_lists(lists, tree);
    write_kv_lens(lists, step);
    return ALL;
}

/* Write what a step of R rows needs into the buffer: see Step. knows_lists, knows_ids: whether the card has what the
 * last call wrote. Returns what has changed, or OUTGROWN if the buffer is too small and nothing was written, or -1 with
 * an exception. */
int64_t ramet_prepare(Lists *lists, const Buffer *buffer, PyObject *tables, const int64_t *segments,
                      int64_t num_segments, const int64_t *rows, int64_t num_rows, const int64_t *kv_lens,
                      const int64_t *query_starts, int knows_lists, int knows_ids)
{
    Step step = {tables, segments, num_segments, rows, num_rows, kv_lens, query_starts};
    if (check(&step) < 0)
        return -1;
    lists->buffer = buffer;
    if (!knows_lists || !suits(lists->tree, &step))
        return prepare_new(lists, &step, knows_ids);
    write_kv_lens(lists, &step);
    if (knows_ids && has_same_tables(lists->tree, &step))
        return update_ids(lists, lists->tree, &step); /* LENGTHS or IDS */
    return write_ids(lists, lists->tree, NULL, NULL, &step) < 0 ? -1 : IDS;
}

/* Let go of what is remembered. */
void ramet_forget(Lists *lists)
{
    free(lists->tree);
    lists->tree = NULL;
}
