/* What a step reads, and how it is cut up. */
#include "lists.h"

#include <stdlib.h>
#include <string.h>

/* How many of the rows that decode stand before a row of the plan. */
static int32_t num_before(const Step *step, int64_t plan_row)
{
    int64_t low = 0, high = step->num_rows;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (step->rows[middle] < plan_row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* One of the plan's segments, for the rows that decode. It has none of them if row0 is row1. */
static Shared shared_of(const Step *step, int64_t index)
{
    const int64_t *segment = step->segments + 5 * index; /* level, row0, row1, block0, block1 */
    return (Shared){num_before(step, segment[1]), num_before(step, segment[2]), segment[3], segment[4]};
}

int suits(const Tree *tree, const Step *step)
{
    if (tree->num_rows != step->num_rows)
        return 0;
    for (int64_t i = 0; i < step->num_rows; i++) {
        const Row *row = &tree->rows[i];
        int64_t grown = step->kv_lens[step->rows[i]] - row->kv_len;
        if (step->query_starts[step->rows[i]] != row->token || grown < 0 || grown > row->spare)
            return 0;
    }
    int64_t num_shared = 0;
    for (int64_t i = 0; i < step->num_segments; i++) {
        Shared shared = shared_of(step, i);
        if (shared.row0 == shared.row1)
            continue;
        if (num_shared == tree->num_shared || memcmp(&shared, &tree->shared[num_shared], sizeof shared))
            return 0;
        num_shared++;
    }
    return num_shared == tree->num_shared;
}

/* An empty tree, in one piece of memory. */
static Tree *allocate(const Card *card, int64_t num_rows, int64_t num_shared)
{
    int64_t most = num_rows + num_shared, num_keyed = most;
    for (int i = 0; i < NUM_TILES; i++)
        num_keyed = card->tiles[i].num_slots > num_keyed ? card->tiles[i].num_slots : num_keyed;
    Tree *tree = calloc(1, sizeof(Tree) + num_rows * sizeof(Row) + num_shared * sizeof(Shared) +
                               most * (sizeof(Segment) + 2 * sizeof(Segment *)) +
                               num_keyed * (2 * sizeof(Keyed) + sizeof(int64_t)));
    if (!tree) {
        PyErr_NoMemory();
        return NULL;
    }
    tree->num_rows = num_rows;
    tree->narrow = (Segment **)(tree + 1); /* what has pointers first, so that all are aligned */
    tree->wide = tree->narrow + most;
    tree->scratch.sorted = (Keyed *)(tree->wide + most);
    tree->scratch.other = tree->scratch.sorted + num_keyed;
    tree->scratch.ends = (int64_t *)(tree->scratch.other + num_keyed);
    tree->rows = (Row *)(tree->scratch.ends + num_keyed);
    tree->shared = (Shared *)(tree->rows + num_rows);
    tree->segments = (Segment *)(tree->shared + num_shared);
    return tree;
}

/* Whether what segments spare is worth their launch. */
static int pays(const Card *card, const Tree *tree)
{
    int64_t read = 0, unshared = 0;
    for (int64_t i = 0; i < tree->num_shared; i++) {
        Shared it = tree->shared[i];
        read += it.block1 - it.block0;
        unshared += (int64_t)(it.block1 - it.block0) * (it.row1 - it.row0);
    }
    double few_rows = card->gate_bytes_few_rows * 2 * read / (unshared > 1 ? unshared : 1);
    return (unshared - read) * card->block_bytes >= card->gate_bytes + few_rows;
}

/* What is read: the shared segments, then what each row has behind them. */
static void find_segments(const Card *card, Tree *tree)
{
    Segment *next = tree->segments;
    int64_t num_shared = pays(card, tree) ? tree->num_shared : 0;
    for (int32_t i = 0; i < num_shared; i++, next++) {
        Shared it = tree->shared[i];
        *next = (Segment){.row0 = it.row0, .num_rows = it.row1 - it.row0, .block0 = it.block0, .is_shared = 1};
        next->num_tokens = (it.block1 - it.block0) * card->block_size;
        next->above = tree->rows[it.row0].deepest;
        for (int32_t row = it.row0; row < it.row1; row++)
            tree->rows[row].deepest = i;
    }
    for (int32_t i = 0; i < tree->num_rows; i++) {
        Row *row = &tree->rows[i];
        int32_t block0 = row->deepest < 0 ? 0 : tree->shared[row->deepest].block1;
        int32_t num_tokens = row->kv_len - block0 * card->block_size;
        if (num_tokens > 0) {
            *next++ = (Segment){.row0 = i, .num_rows = 1, .block0 = block0, .num_tokens = num_tokens};
            row->spare = card->spare_tokens;
        }
    }
    tree->num_segments = next - tree->segments;
    for (int64_t i = 0; i < tree->num_segments; i++) {
        Segment *it = &tree->segments[i];
        if (it->is_shared && it->num_rows * card->group > card->narrow_rows)
            tree->wide[tree->num_wide++] = it;
        else
            tree->narrow[tree->num_narrow++] = it;
    }
}

static int64_t num_tokens_of(Segment **segments, int64_t n)
{
    int64_t num_tokens = 0;
    for (int64_t i = 0; i < n; i++)
        num_tokens += segments[i]->num_tokens;
    return num_tokens;
}

/* Choose the tile of narrow segments where no others are, and cut them to fill the card. */
static void cut_narrow_alone(Lists *lists, Tree *tree)
{
    const Card *card = &lists->card;
    const Tile *deep = &card->tiles[DEEP];
    int64_t num_tokens = num_tokens_of(tree->narrow, tree->num_narrow);
    int few = num_tokens * card->num_kv_heads < card->min_chunk * 2 * card->num_sms;
    lists->wide_tile = WIDE; /* of no items */
    if (deep->rows > 0 && !few) {
        int64_t num_chunks = 0;
        even_cut(tree->narrow, tree->num_narrow, card->min_chunk, deep, tree->scratch);
        for (int64_t i = 0; i < tree->num_narrow; i++)
            num_chunks += tree->narrow[i]->num_chunks;
        lists->narrow_tile = DEEP;
        if (num_chunks <= deep->num_slots)
            return;
    }
    lists->narrow_tile = few ? NARROW_FEW : NARROW;
    even_cut(tree->narrow, tree->num_narrow, card->min_chunk, &card->tiles[lists->narrow_tile], tree->scratch);
}

/* Choose the tiles of narrow segments and of wide ones. One size for all that are wide: launches of three sizes side by
 * side gained nothing. */
static void choose_tiles_side_by_side(Lists *lists, const Tree *tree)
{
    const Card *card = &lists->card;
    int64_t wide_scores = 0, most_rows = 0;
    for (int64_t i = 0; i < tree->num_wide; i++) {
        const Segment *it = tree->wide[i];
        wide_scores += (int64_t)it->num_tokens * it->num_rows;
        most_rows = it->num_rows > most_rows ? it->num_rows : most_rows;
    }
    double flops = 4.0 * wide_scores * card->group * card->num_kv_heads * card->head_dim;
    double read = (double)num_tokens_of(tree->narrow, tree->num_narrow) * card->block_bytes / card->block_size;
    double balance = flops / (read > 1 ? read : 1) / card->flops_per_byte;
    int computes_longer = balance > 1 && most_rows * card->group > 64;
    lists->narrow_tile = balance > 0.6 ? NARROW_BESIDE_WIDE : NARROW;
    lists->wide_tile = computes_longer ? WIDE_COMPUTES_LONGER : WIDE;
}

/* Cut each segment for its tile: wide ones over the SMs, narrow ones to fill the card. */
static void cut_side_by_side(const Lists *lists, Tree *tree)
{
    const Card *card = &lists->card;
    const Tile *narrow = &card->tiles[lists->narrow_tile], *wide = &card->tiles[lists->wide_tile];
    int64_t num_tokens = 0; /* that tiles read */
    for (int64_t i = 0; i < tree->num_wide; i++) {
        Segment *it = tree->wide[i];
        it->num_tiles = (it->num_rows + wide->rows - 1) / wide->rows;
        num_tokens += (int64_t)it->num_tokens * it->num_tiles;
    }
    double share = (double)num_tokens / wide->num_slots;
    cut(tree->wide, tree->num_wide, card->min_chunk, wide->grain, share);
    even_cut(tree->narrow, tree->num_narrow, card->min_chunk, narrow, tree->scratch);
}

/* Number the parts of each row along its path. A row with a segment of its own, in one chunk, and nothing else has
 * none to merge: its item writes the output. */
static void number_parts(Lists *lists, Tree *tree)
{
    for (int64_t i = 0; i < tree->num_segments; i++) {
        Segment *it = &tree->segments[i];
        it->part0 = tree->rows[it->row0].num_parts; /* a segment comes after those above it */
        it->is_whole = !it->is_shared && it->part0 == 0 && it->num_chunks == 1;
        for (int32_t row = it->row0; row < it->row0 + it->num_rows && !it->is_whole; row++)
            tree->rows[row].num_parts += it->num_chunks;
    }
    lists->num_parts = lists->most_parts = lists->num_merges = 0;
    for (int64_t i = 0; i < tree->num_rows; i++) {
        int64_t num_parts = tree->rows[i].num_parts;
        lists->num_parts += num_parts;
        lists->num_merges += num_parts > 0;
        lists->most_parts = num_parts > lists->most_parts ? num_parts : lists->most_parts;
    }
}

/* Give each segment room for its block ids, a row's own for more as it grows. */
static void make_room(const Card *card, Tree *tree)
{
    for (int64_t i = 0; i < tree->num_segments; i++) {
        Segment *it = &tree->segments[i];
        it->num_blocks = (it->num_tokens + card->block_size - 1) / card->block_size;
        if (!it->is_shared)
            it->num_blocks += (card->spare_tokens + card->block_size - 1) / card->block_size;
        int64_t place = tree->num_ids; /* too far for 32 bits in a tree that `count` refuses */
        it->place = place;
        tree->num_ids += it->num_blocks;
        /* In its own segment, or in the deepest shared one, which is the last that comes along here. */
        for (int32_t row = it->row0; row < it->row0 + it->num_rows; row++)
            tree->rows[row].place = place - it->block0;
    }
}

/* Count what goes to each section. Returns 0, or -1 with an exception if that is too much. */
static int count(Lists *lists, const Tree *tree)
{
    lists->num_narrow = lists->num_wide = 0;
    for (int64_t i = 0; i < tree->num_narrow; i++)
        lists->num_narrow += tree->narrow[i]->num_chunks;
    for (int64_t i = 0; i < tree->num_wide; i++)
        lists->num_wide += (int64_t)tree->wide[i]->num_chunks * tree->wide[i]->num_tiles;
    int64_t *needed = lists->needed;
    needed[TOKENS] = needed[PART_STARTS] = needed[KV_LENS] = tree->num_rows;
    needed[MERGES] = 4 * lists->num_merges;
    needed[NARROW_ITEMS] = 8 * (lists->num_narrow + 1); /* an item without rows ends them: see attend_kernel */
    needed[WIDE_ITEMS] = 8 * lists->num_wide;
    needed[BLOCK_IDS] = tree->num_ids;
    int fits = lists->num_parts <= MAX_NUMBER;
    for (int i = 0; i < NUM_SECTIONS; i++)
        fits &= needed[i] <= MAX_NUMBER;
    if (fits)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a step reads more than 2^30 blocks, or in more than 2^30 parts");
    return -1;
}

Tree *make_tree(Lists *lists, const Step *step)
{
    Tree *tree = allocate(&lists->card, step->num_rows, step->num_segments);
    if (!tree)
        return NULL;
    for (int64_t i = 0; i < step->num_rows; i++) {
        int64_t row = step->rows[i];
        tree->rows[i] = (Row){.token = step->query_starts[row], .kv_len = step->kv_lens[row], .deepest = -1};
    }
    for (int64_t i = 0; i < step->num_segments; i++) {
        Shared shared = shared_of(step, i);
        if (shared.row0 < shared.row1)
            tree->shared[tree->num_shared++] = shared;
    }
    find_segments(&lists->card, tree);
    if (tree->num_wide > 0) {
        choose_tiles_side_by_side(lists, tree);
        cut_side_by_side(lists, tree);
    } else {
        cut_narrow_alone(lists, tree);
    }
    number_parts(lists, tree);
    make_room(&lists->card, tree);
    if (count(lists, tree) < 0) {
        free(tree);
        return NULL;
    }
    return tree;
}
