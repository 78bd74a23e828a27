/* How segments are cut into chunks, such that all of the card works until the end. */
#ifndef RAMET_CUT_H
#define RAMET_CUT_H

#include <stdint.h>

/* KV that is read once, for rows [row0, row0 + num_rows) of those that decode. */
typedef struct {
    int32_t row0, num_rows;
    int32_t block0, num_tokens; /* from the start of that block on */
    int32_t is_shared;
    int32_t above;              /* of a shared one: the one around it, or -1 */
    int32_t num_tiles;          /* of a wide one: how many its rows take */
    int32_t num_chunks;
    int32_t chunk_tokens;       /* the last chunk may have fewer */
    int32_t part0;              /* of its rows' parts, the one that its first chunk yields */
    int32_t is_whole;           /* whether it is all that its row sees, in one chunk */
    int32_t num_blocks, place;  /* the room for its block ids */
} Segment;

/* One build of the kernel on this card, see ramet.kernels.cuda.tile. */
typedef struct {
    int64_t rows;      /* of the batch in one tile; 0 for a build that there is not */
    int64_t grain;     /* tokens that chunks are multiples of: those of a tile, or of a block if that is more */
    int64_t num_slots; /* items that run at a time; each takes one CTA a KV head */
} Tile;

typedef struct {
    int64_t key;
    Segment *segment;
} Keyed;

/* Room to sort in. */
typedef struct {
    Keyed *sorted, *other; /* each for n segments, or num_slots */
    int64_t *ends;         /* [num_slots] */
} Scratch;

/* Cut n segments into chunks of about `share` tokens, not below about `least`. Chunks are multiples of `grain`, and
 * those of one segment are alike. Returns whether any has another number of them than before. */
int cut(Segment **segments, int64_t n, int64_t least, int32_t grain, double share);

/* Cut n segments so that a tile's slots get about the same. */
void even_cut(Segment **segments, int64_t n, int64_t least, const Tile *tile, Scratch scratch);

/* Sort n segments into scratch.sorted, those with the longest chunks first and else as they are. */
void sort_longest_first(Segment **segments, int64_t n, Scratch scratch);

#endif
