#include "cut.h"

#include <math.h>
#include <string.h>

#define EVEN_ENOUGH 0.94 /* of the rate of a perfect fit */
/* What starting and ending a CTA costs, and a part that has to be merged, in tokens read. */
#define CTA_TOKENS 40
#define PART_TOKENS 8
#define FULL_RATE_FROM 0.55 /* of the slots: with fewer CTAs the memory is not busy any more */

static void cut_one(Segment *it, int32_t grain, double wanted)
{
    int32_t num_grains = (it->num_tokens + grain - 1) / grain, num_chunks = rint(it->num_tokens / wanted);
    if (num_chunks < 1)
        num_chunks = 1;
    int32_t grains = (num_grains + num_chunks - 1) / num_chunks; /* of a chunk */
    it->chunk_tokens = grains * grain;
    it->num_chunks = (num_grains + grains - 1) / grains;
}

int cut(Segment **segments, int64_t n, int64_t least, int32_t grain, double share)
{
    double wanted = fmax(share, least);
    int differs = 0;
    for (int64_t i = 0; i < n; i++) {
        Segment *it = segments[i];
        const Segment *last = i > 0 ? segments[i - 1] : NULL;
        int32_t before = it->num_chunks;
        if (last && last->num_tokens == it->num_tokens) { /* as of branches that were forked together */
            it->num_chunks = last->num_chunks;
            it->chunk_tokens = last->chunk_tokens;
        } else {
            cut_one(it, grain, wanted);
        }
        differs |= it->num_chunks != before;
    }
    return differs;
}

/* Sort scratch.sorted by its keys, none of which is negative, byte by byte; equal ones stay as they are. */
static void sort(int64_t n, Scratch scratch)
{
    Keyed *from = scratch.sorted, *to = scratch.other;
    int64_t largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = from[i].key > largest ? from[i].key : largest;
    for (int shift = 0; shift < 63 && largest >> shift; shift += 8) {
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < n; i++)
            starts[(from[i].key >> shift & 255) + 1]++;
        for (int byte = 0; byte < 256; byte++)
            starts[byte + 1] += starts[byte];
        for (int64_t i = 0; i < n; i++)
            to[starts[from[i].key >> shift & 255]++] = from[i];
        Keyed *swapped = from;
        from = to;
        to = swapped;
    }
    if (from != scratch.sorted)
        memcpy(scratch.sorted, from, n * sizeof *from);
}

void sort_longest_first(Segment **segments, int64_t n, Scratch scratch)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++)
        longest = segments[i]->chunk_tokens > longest ? segments[i]->chunk_tokens : longest;
    for (int64_t i = 0; i < n; i++)
        scratch.sorted[i] = (Keyed){longest - segments[i]->chunk_tokens, segments[i]};
    sort(n, scratch);
}

/* When each slot is through, in tokens read. The longest chunks start first, and the slot that is through first takes
 * the next: approximated by dealing them out in rounds that go back and forth. Returns the number of chunks. */
static int64_t deal(Segment **segments, int64_t n, int64_t num_slots, Scratch scratch)
{
    int64_t num_chunks = 0, slot = 0, step = 1;
    sort_longest_first(segments, n, scratch);
    memset(scratch.ends, 0, num_slots * sizeof *scratch.ends);
    for (int64_t i = 0; i < n; i++) {
        const Segment *it = scratch.sorted[i].segment;
        num_chunks += it->num_chunks;
        for (int32_t chunk = 0; chunk < it->num_chunks; chunk++) {
            scratch.ends[slot] += it->chunk_tokens + CTA_TOKENS;
            slot += step;
            if (slot < 0 || slot == num_slots) {
                slot -= step;
                step = -step;
            }
        }
    }
    return num_chunks;
}

/* How long the chunks take, in tokens that a slot reads at full rate. All that run share the memory evenly. */
static double duration(Segment **segments, int64_t n, int64_t num_slots, Scratch scratch)
{
    int64_t num_chunks = deal(segments, n, num_slots, scratch), end = 0;
    for (int64_t slot = 0; slot < num_slots; slot++)
        scratch.sorted[slot].key = scratch.ends[slot];
    sort(num_slots, scratch);
    double reading = 0;
    for (int64_t slot = 0; slot < num_slots; slot++) {
        double running = fmax(num_slots - slot, FULL_RATE_FROM * num_slots);
        reading += (scratch.sorted[slot].key - end) * running;
        end = scratch.sorted[slot].key;
    }
    return reading / num_slots + (double)(PART_TOKENS * (num_chunks - n)) / num_slots;
}

/* A chunk a slot is best, as each halving costs 1 to 3 %, but only if that comes out even. Otherwise finer cuts are
 * tried: they leave less to wait for at the end. */
void even_cut(Segment **segments, int64_t n, int64_t least, const Tile *tile, Scratch scratch)
{
    static const double finer[] = {1, 1.75, 3};
    int64_t total = 0, longest = 0;
    for (int64_t i = 0; i < n; i++) {
        total += segments[i]->num_tokens;
        longest = segments[i]->num_tokens > longest ? segments[i]->num_tokens : longest;
    }
    double share = (double)total / tile->num_slots, last = share, best = share, quickest = INFINITY;
    for (int i = 0; i < 3 && quickest * EVEN_ENOUGH > share; i++) {
        if (i > 0 && longest < 1.5 * fmax(share / finer[i], least))
            continue; /* all stay whole, as they were */
        if (!cut(segments, n, least, tile->grain, share / finer[i]) && i > 0)
            continue;
        last = share / finer[i];
        double took = duration(segments, n, tile->num_slots, scratch);
        if (took < quickest) {
            quickest = took;
            best = last;
        }
    }
    if (last != best)
        cut(segments, n, least, tile->grain, best);
}
