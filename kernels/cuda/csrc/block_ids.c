/* The ids of the blocks that a step reads. As long as a row's table is the same object, it changes from a step to the
 * next from the last block of the first on only: that may be a copy now, and others may have joined it (AttentionPlan).
 * Only those are read of such a row, in a new tree as well: its other ids are copied from where they were. Python's
 * numbers lie all over the memory, and to read the 9,000 of a tree of 256 branches takes 80 us. */
#include <stdlib.h>
#include <string.h>

#include "lists.h"

/* How many blocks of a row's table are in use. */
static int32_t end_of(const Lists *lists, const Step *step, int64_t row)
{
    int32_t size = lists->card.block_size, kv_len = step->kv_lens[step->rows[row]];
    return (kv_len + size - 1) / size;
}

static PyObject *table_of(const Step *step, int64_t row)
{
    return PyList_GetItem(step->tables, step->rows[row]);
}

/* Read ids [block0, block1) of a table. Returns 0, or -1 with an exception. */
static int read_ids(PyObject *table, int32_t block0, int32_t block1, int32_t *ids)
{
    for (int32_t block = block0; block < block1; block++) {
        PyObject *id = PySequence_GetItem(table, block);
        ids[block - block0] = int_of(id);
        if (id)
            Py_DecRef(id);
        if (ids[block - block0] < 0)
            return -1;
    }
    return 0;
}

/* Up to which block a row's table is what it was. */
static int32_t known_until(const Row *before, int32_t end)
{
    return (before->end < end ? before->end : end) - 1;
}

/* Copy ids [block0, block1) of a row of a tree: from the end on, what is its own, then what it shares. */
static void copy_ids(const Tree *tree, const int32_t *from, const Row *row, int32_t block0, int32_t block1,
                     int32_t *ids)
{
    const Segment *segments = tree->segments;
    int32_t place = row->place; /* of block 0, if it lay beside what is below `above` */
    int32_t above = row->deepest;
    while (block0 < block1) {
        int32_t first = above < 0 ? 0 : segments[above].block0 + segments[above].num_blocks;
        first = first < block0 ? block0 : first;
        if (first < block1) {
            memcpy(ids + (first - block0), from + place + first, (block1 - first) * sizeof *ids);
            block1 = first;
        }
        if (above >= 0) {
            place = segments[above].place - segments[above].block0;
            above = segments[above].above;
        }
    }
}

/* Where a table is in a hash table of rows, or where it would be. */
static int64_t find_slot(PyObject *table, const Row *rows, const int32_t *slots, int64_t num_slots)
{
    int64_t slot = ((uint64_t)(uintptr_t)table >> 4) * 0x9e3779b97f4a7c15u >> 32 & (num_slots - 1);
    while (slots[slot] >= 0 && rows[slots[slot]].table != table)
        slot = (slot + 1) & (num_slots - 1);
    return slot;
}

/* Find each row's table in the tree before. Returns 0, or -1 with an exception. */
static int find_rows_before(Tree *tree, const Tree *before)
{
    int64_t num_slots = 1;
    while (num_slots < 2 * before->num_rows)
        num_slots *= 2;
    int32_t *slots = malloc(num_slots * sizeof *slots);
    if (!slots) {
        PyErr_NoMemory();
        return -1;
    }
    memset(slots, -1, num_slots * sizeof *slots);
    for (int64_t i = 0; i < before->num_rows; i++)
        slots[find_slot(before->rows[i].table, before->rows, slots, num_slots)] = i;
    for (int64_t i = 0; i < tree->num_rows; i++)
        tree->rows[i].before = slots[find_slot(tree->rows[i].table, before->rows, slots, num_slots)];
    free(slots);
    return 0;
}

/* One of the rows of a segment, which hold the same ids there: the first that is known, if there is one. */
static const Row *any_row(const Tree *tree, const Segment *it)
{
    for (int32_t i = it->row0; i < it->row0 + it->num_rows; i++)
        if (tree->rows[i].before >= 0)
            return &tree->rows[i];
    return &tree->rows[it->row0];
}

static int write_segment(const Tree *tree, const Segment *it, const Tree *before, const int32_t *from, int32_t *ids)
{
    const Row *row = any_row(tree, it);
    int32_t known = it->block0, end = it->is_shared ? it->block0 + it->num_blocks : row->end;
    if (row->before >= 0) {
        int32_t until = known_until(&before->rows[row->before], row->end);
        until = until < end ? until : end;
        known = until < known ? known : until;
        copy_ids(before, from, &before->rows[row->before], it->block0, known, ids);
    }
    int32_t num_ids = end - it->block0;
    memset(ids + num_ids, 0, (it->num_blocks - num_ids) * sizeof *ids);
    return read_ids(row->table, known, end, ids + (known - it->block0));
}

int write_ids(const Lists *lists, Tree *tree, const Tree *before, const int32_t *from, const Step *step)
{
    int32_t *ids = section(lists, BLOCK_IDS);
    for (int64_t i = 0; i < tree->num_rows; i++) {
        tree->rows[i].table = table_of(step, i);
        tree->rows[i].end = end_of(lists, step, i);
        tree->rows[i].before = -1;
    }
    if (before && find_rows_before(tree, before) < 0)
        return -1;
    for (int64_t i = 0; i < tree->num_segments; i++)
        if (write_segment(tree, &tree->segments[i], before, from, ids + tree->segments[i].place) < 0)
            return -1;
    for (int64_t i = 0; i < tree->num_rows; i++)
        tree->rows[i].last_id = ids[tree->rows[i].place + tree->rows[i].end - 1];
    return 0;
}

int has_same_tables(const Tree *tree, const Step *step)
{
    for (int64_t i = 0; i < tree->num_rows; i++)
        if (table_of(step, i) != tree->rows[i].table)
            return 0;
    return 1;
}

int update_ids(const Lists *lists, Tree *tree, const Step *step)
{
    int has_changed = 0;
    for (int64_t i = 0; i < tree->num_rows; i++) {
        Row *row = &tree->rows[i];
        int32_t *ids = section(lists, BLOCK_IDS) + row->place, end = end_of(lists, step, i), last_id;
        if (read_ids(row->table, end - 1, end, &last_id) < 0)
            return -1;
        if (end == row->end && last_id == row->last_id)
            continue;
        int32_t known = known_until(row, end);
        if (read_ids(row->table, known, end, ids + known) < 0)
            return -1;
        row->end = end;
        row->last_id = last_id;
        has_changed = 1;
    }
    return has_changed;
}
