/* The lists themselves: which parts of a row are merged, and what each program of a launch attends to. */
#include "lists.h"

#include <string.h>

int32_t *section(const Lists *lists, int index)
{
    return lists->buffer->numbers + lists->buffer->starts[index];
}

/* Fill what is left of a section: what lies behind a list is without rows, or parts. */
static void end_list(const Lists *lists, int index, int64_t num_used)
{
    int64_t size = lists->buffer->starts[index + 1] - lists->buffer->starts[index];
    memset(section(lists, index) + num_used, 0, (size - num_used) * sizeof(int32_t));
}

static void write_merges(const Lists *lists, const Tree *tree)
{
    int32_t *tokens = section(lists, TOKENS), *part_starts = section(lists, PART_STARTS), num_parts = 0;
    Merge *next = (Merge *)section(lists, MERGES);
    for (int64_t i = 0; i < tree->num_rows; i++) {
        Row row = tree->rows[i];
        tokens[i] = row.token;
        part_starts[i] = num_parts;
        if (row.num_parts > 0)
            *next++ = (Merge){.token = row.token, .first_part = num_parts, .num_parts = row.num_parts};
        num_parts += row.num_parts;
    }
    end_list(lists, MERGES, 4 * lists->num_merges);
}

/* The items of one chunk. Its tiles stand side by side: the first reads it from memory, the others from L2. */
static Item *write_chunk(const Card *card, const Segment *it, int32_t chunk, int32_t tile_rows, Item *next)
{
    int32_t first_token = chunk * it->chunk_tokens, num_tokens = it->num_tokens - first_token;
    Item item = {
        .row0 = it->row0,
        .num_rows = it->num_rows,
        .first_id = it->place + first_token / card->block_size,
        .position = it->block0 * card->block_size + first_token,
        .num_tokens = num_tokens < it->chunk_tokens ? num_tokens : it->chunk_tokens,
        .part = it->part0 + chunk,
        .is_whole = it->is_whole,
    };
    if (!it->is_shared && chunk == it->num_chunks - 1)
        item.num_tokens = OPEN;
    for (int32_t row = 0; row < it->num_rows; row += tile_rows) {
        item.row0 = it->row0 + row;
        item.num_rows = it->num_rows - row < tile_rows ? it->num_rows - row : tile_rows;
        *next++ = item;
    }
    return next;
}

/* The longest first, so that the last to finish are short. */
static void write_items(const Lists *lists, int index, Segment **segments, int64_t n, Scratch scratch, int64_t tile)
{
    int32_t tile_rows = lists->card.tiles[tile].rows;
    Item *first = (Item *)section(lists, index), *next = first;
    sort_longest_first(segments, n, scratch);
    for (int64_t i = 0; i < n; i++)
        for (int32_t chunk = 0; chunk < scratch.sorted[i].segment->num_chunks; chunk++)
            next = write_chunk(&lists->card, scratch.sorted[i].segment, chunk, tile_rows, next);
    end_list(lists, index, 8 * (next - first));
}

void write_lists(const Lists *lists, const Tree *tree)
{
    write_merges(lists, tree);
    write_items(lists, NARROW_ITEMS, tree->narrow, tree->num_narrow, tree->scratch, lists->narrow_tile);
    write_items(lists, WIDE_ITEMS, tree->wide, tree->num_wide, tree->scratch, lists->wide_tile);
}
