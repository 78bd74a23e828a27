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
    int64_t narrow_rows; /* query rows of a narrow tile */
    int64_t block_bytes; /* of a layer */
    int32_t block_size;
    /* Constants of ramet.kernels.cuda.work_list and tile, which say why. */
    int32_t spare_tokens;
    int64_t min_chunk;
    double gate_bytes, gate_bytes_few_rows, flops_per_byte;
} Card;

/* The sections of the buffer that the card gets a copy of: tokens and part_starts [R]; merges and items, behind which
 * the sections hold zeros; kv_lens [R] and the ids of the segments' blocks. */
enum { TOKENS, PART_STARTS, MERGES, NARROW_ITEMS, WIDE_ITEMS, KV_LENS, BLOCK_IDS, NUM_SECTIONS };

typedef struct {
    int32_t *numbers;
    int64_t starts[NUM_SECTIONS + 1]; /* of the sections, and the end of the last */
} Buffer;

/* One chunk of a segment for the query rows of one tile. */
typedef struct {
    int32_t row0, num_rows; /* 0 rows fill up a launch of fixed size */
    int32_t first_id;       /* where in the ids that of its first block is */
    int32_t position;
    int32_t num_tokens;     /* OPEN: as far as its row reaches, whose length the kernel looks up */
    int32_t part;           /* of each of its rows */
    int32_t is_whole;       /* whether it is all of its row */
    int32_t unused;
} Item;

#define OPEN -1

typedef struct {
    int32_t token, first_part, num_parts, unused;
} Merge;

/* Blocks [block0, block1) of rows [row0, row1), as the plan shares them. */
typedef struct {
    int32_t row0, row1, block0, block1;
} Shared;

typedef struct {
    PyObject *table;   /* borrowed: read in its step, in the next one only compared */
    int32_t token;     /* its query's index in the batch */
    int32_t kv_len;    /* when the lists were made, */
    int32_t spare;     /* and by how much it may have grown since */
    int32_t end;       /* how many blocks of its table it used in the step before, */
    int32_t last_id;   /* and the last of them */
    int32_t deepest;   /* the last shared segment on its path, or -1 */
    int32_t place;     /* where block 0 of its table would lie beside its last block */
    int32_t num_parts; /* to be merged */
    int32_t before;    /* its row in the step before, or -1 */
} Row;

/* What is remembered of a step. */
typedef struct {
    int64_t num_rows, num_shared, num_segments, num_narrow, num_wide, num_ids;
    Row *rows;
    Shared *shared;           /* all of the plan that decoding rows share */
    Segment *segments;        /* the shared ones if they pay together, each after those above it; then the rows' own */
    Segment **narrow, **wide; /* the same, by what bounds them: see ramet.kernels.cuda.tile */
    Scratch scratch;
} Tree;

/* One step, as Python has it: a plan of S rows, and which of them decode. */
typedef struct {
    PyObject *tables;            /* a list of S sequences of block ids */
    const int64_t *segments;     /* [X, 5] */
    int64_t num_segments;        /* X */
    const int64_t *rows;         /* [R] in order */
    int64_t num_rows;            /* R */
    const int64_t *kv_lens;      /* [S] */
    const int64_t *query_starts; /* [S + 1] */
} Step;

/* What ramet.kernels.cuda.work_list shares with the functions here. */
typedef struct {
    Card card;
    /* Of the lists that were made last: */
    int64_t needed[NUM_SECTIONS]; /* numbers in each section */
    int64_t narrow_tile, wide_tile, num_narrow, num_wide, num_merges, num_parts, most_parts;
    const Buffer *buffer;
    Tree *tree;
} Lists;

int32_t *section(const Lists *lists, int index);

/* Whether the lists hold for a step: the same tree, its rows grown a little at most. */
int suits(const Tree *tree, const Step *step);

/* Find what the step reads, choose tiles, cut it, and count what the lists take. NULL with an exception. */
Tree *make_tree(Lists *lists, const Step *step);

/* Write all lists. */
void write_lists(const Lists *lists, const Tree *tree);

/* Write the block ids of all segments. Those of rows whose table was in the tree before, if there is one, are copied
 * from its ids, the others read. Returns 0, or -1 with an exception. */
int write_ids(const Lists *lists, Tree *tree, const Tree *before, const int32_t *from, const Step *step);

/* Whether all tables are those of the step before. */
int has_same_tables(const Tree *tree, const Step *step);

/* Of a step with the same tables, write the ids that may be others. Returns whether any is, or -1 with an exception. */
int update_ids(const Lists *lists, Tree *tree, const Step *step);

#endif
