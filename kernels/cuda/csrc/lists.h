/* The lists of a decode step: what it launches, and on what. ramet.kernels.cuda.work_list hands them to the card.
 *
 * R rows decode, those of a plan that have one query, in depth-first order. */
#ifndef RAMET_LISTS_H
#define RAMET_LISTS_H

#include "cut.h"
#include "python.h"

enum { NARROW, NARROW_FEW, NARROW_BESIDE_WIDE, DEEP, WIDE, WIDE_COMPUTES_LONGER, NUM_TILES };

/* What stays for all steps over a pool: the card, the heads, and what pays on it. */
typedef struct {
    Tile tiles[NUM_TILES];
    int64_t num_sms, num_kv_heads, head_dim;
    int64_t group;       /* query heads of a KV head */
    int64_t block_bytes; /* of a layer */
    int32_t block_size;
    int32_t spare_tokens; /* by how much rows may grow before they want new lists */
    int64_t narrow_rows; /* query rows of a narrow tile */
    int64_t min_chunk;   /* tokens: a part has to be written, read and added up */
    /* Shared segments cost a further launch. They pay from so many bytes a layer that are not read again; from more
     * if few rows share. */
    double gate_bytes, gate_bytes_few_rows;
    double flops_per_byte; /* where the card computes as long as it reads */
} Card;

/* The sections of the buffer that the card gets a copy of: tokens and part_starts [R]; merges and items, behind which
 * the sections hold zeros; kv_lens [R] and the ids of the segments' blocks. */
enum { TOKENS, PART_STARTS, MERGES, NARROW_ITEMS, WIDE_ITEMS, KV_LENS, BLOCK_IDS, NUM_SECTIONS };

typedef struct {
    int32_t *numbers;
    int64_t starts[NUM_SECTIONS + 1]; /* of the sections, and the end of the last */
} Buffer;

/* What one launch's programs take from its list. */
typedef struct {
    int32_t row0, num_rows;     /* 0 rows fill up a launch of fixed size */
    int32_t first_id;           /* among the block ids */
    int32_t position, num_tokens;
    int32_t part, is_whole, unused;
} Item;

typedef struct {
    int32_t token, first_part, num_parts, unused;
} Merge;

/* Blocks [block0, block1) of rows [row0, row1), as the plan shares them. */
typedef struct {
    int32_t row0, row1, block0, block1;
} Shared;

typedef struct {
    PyObject *table;   /* of the step before; only ever compared */
    int32_t token;     /* its query's index in the batch */
    int32_t kv_len;    /* when the lists were made, */
    int32_t spare;     /* and by how much it may have grown since */
    int32_t end;       /* blocks of its table that it used in the step before */
    int32_t last_id;   /* and the last of them */
    int32_t deepest;   /* the last shared segment on its path, or -1 */
    int32_t place;     /* where block 0 of its table would lie beside its last block */
    int32_t num_parts; /* of its own, to be merged */
    int32_t before;    /* its row in the step before, or -1 */
} Row;

/* What is remembered of a step. */
typedef struct {
    int64_t num_rows, num_shared, num_segments, num_shared_segments, num_ids;
    Row *rows;
    Shared *shared;      /* all of the plan, with these rows */
    Segment *segments;   /* the shared ones if they pay together, each after those above it; then a row's own */
    Segment **narrow, **wide;
    int64_t num_narrow, num_wide; /* segments */
    Scratch scratch;
} Tree;

/* One step, as Python has it. */
typedef struct {
    PyObject *tables;            /* a list of the plan's rows' sequences of block ids */
    PyObject *segments;          /* the plan's */
    const int64_t *rows;         /* [R] which of the plan's rows decode */
    int64_t num_rows;
    const int64_t *kv_lens, *query_starts; /* of the plan's rows */
} Step;

/* What ramet.kernels.cuda.work_list shares with the functions below. */
typedef struct {
    Card card;
    /* Of the lists that were made last: */
    int64_t needed[NUM_SECTIONS]; /* numbers in each section */
    int64_t narrow_tile, wide_tile, num_narrow, num_wide, num_merges, num_parts, most_parts;
    const Buffer *buffer;
    Tree *tree;
} Lists;

int32_t *section(const Lists *lists, int index);

/* Whether the lists hold for a step: the same tree, its rows grown a little at most. -1 with an exception. */
int suits(const Tree *tree, const Step *step);

/* Find what the step reads, choose tiles, cut it, and count what the lists take. NULL with an exception. */
Tree *make_tree(Lists *lists, const Step *step);

/* Write all lists. */
void write_lists(Lists *lists, const Tree *tree);

/* Write the block ids of all segments. Those of rows whose table was in the tree before, if there is one, are copied
 * from its ids, the others read. Returns 0, or -1 with an exception. */
int write_ids(const Lists *lists, Tree *tree, const Tree *before, const int32_t *from, const Step *step);

/* Whether all tables are those of the step before. */
int has_same_tables(const Tree *tree, const Step *step);

/* Of a step with the same tables, write the ids that may be others. Returns whether any is, or -1 with an exception. */
int update_ids(const Lists *lists, Tree *tree, const Step *step);

#endif
