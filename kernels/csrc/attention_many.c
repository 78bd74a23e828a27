/* Many queries on a stretch of KV, such as the rows that share it: vectors run along the queries.
 *
 * K and V of a tile of slots are brought into a dense buffer of floats once and stay in the cache for all queries
 * of the task. Then scores^T = K q^T, weights^T, out^T = V^T weights^T: nothing is summed across a vector. */
#include <math.h>

#include "attention.h"

#define TILE 64 /* slots */
#define ROWS 8  /* of a product that are summed at a time, */
#ifdef __AVX512F__
#define WIDTH 2 /* for so many vectors of queries: what fits in the registers */
#else
#define WIDTH 1
#endif
#define MAX_GROUPS (MAX_MANY / LANES)

/* 16 queries of the task. */
typedef struct {
    floats q[MAX_HEAD_DIM];   /* [D], scaled */
    floats out[MAX_HEAD_DIM]; /* [D] */
    floats scores[TILE];      /* then weights */
    floats max, sum;
    int64_t begin, end; /* slots outside are hidden from all of them, */
    int64_t low, high;  /* those inside from none */
    int32_t lows[LANES], ends[LANES]; /* what each of them sees */
} Lanes;

typedef struct {
    float key[TILE * MAX_HEAD_DIM]; /* [TILE, width], width being the head size rounded up */
    float value[TILE * MAX_HEAD_DIM];
    Lanes lanes[MAX_GROUPS];
} Scratch;

/* Not on the stack, which a caller's thread may have little of. */
static _Thread_local Scratch scratch;

/* Transpose a square: swap, for blocks of 1, 2, 4 and 8, those off the diagonal. */
static void transpose(floats x[LANES])
{
#define SWAP(size, low, high)                                 \
    for (int i = 0; i < LANES; i++)                           \
        if (!(i & size)) {                                    \
            floats a = x[i], b = x[i + size];                 \
            x[i] = low(a, b);                                 \
            x[i + size] = high(a, b);                         \
        }
#define LOW1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOW2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
    SWAP(1, LOW1, HIGH1)
    SWAP(2, LOW2, HIGH2)
    SWAP(4, LOW4, HIGH4)
    SWAP(8, LOW8, HIGH8)
}

/* Fill in what a group of `num` queries from `query` on is, and what it sees. */
INLINE void start_lanes(const Job *job, Lanes *lanes, int64_t query, int64_t num, const int is_half)
{
    const Step *step = job->step;
    int64_t head_dim = step->head_dim, num_slots = job->task->num_slots;
    int64_t starts[LANES];
    lanes->low = lanes->end = 0;
    lanes->begin = lanes->high = num_slots;
    for (int i = 0; i < num; i++) {
        int64_t token = token_of(job, query + i);
        int64_t low = step->lows[token] - job->task->position, end = step->ends[token] - job->task->position;
        low = low > 0 ? low : 0;
        end = end < num_slots ? end : num_slots;
        lanes->lows[i] = low;
        lanes->ends[i] = end;
        lanes->low = low > lanes->low ? low : lanes->low;
        lanes->begin = low < lanes->begin ? low : lanes->begin;
        lanes->high = end < lanes->high ? end : lanes->high;
        lanes->end = end > lanes->end ? end : lanes->end;
        starts[i] = query_start(job, query + i);
    }
    for (int64_t i = num; i < LANES; i++)
        lanes->lows[i] = lanes->ends[i] = 0;
    for (int64_t v = 0; v < num_vectors(head_dim); v++) {
        int64_t start = vector_start(v, head_dim);
        floats x[LANES];
        for (int i = 0; i < LANES; i++)
            x[i] = i < num ? load(job->queries.numbers, starts[i] + start, is_half) * job->scale : all(0);
        transpose(x);
        memcpy(lanes->q + start, x, sizeof x);
    }
    memset(lanes->out, 0, num_vectors(head_dim) * LANES * sizeof(floats));
    lanes->max = all(LOWEST);
    lanes->sum = all(0);
}

static void finish_lanes(const Job *job, const Lanes *lanes, int64_t query, int64_t num)
{
    int64_t head_dim = job->step->head_dim;
    for (int64_t v = 0; v < num_vectors(head_dim); v++) {
        int64_t start = vector_start(v, head_dim);
        floats x[LANES];
        memcpy(x, lanes->out + start, sizeof x);
        transpose(x);
        for (int i = 0; i < num; i++)
            *(floats *)(job->outs + (query + i) * head_dim + start) = x[i];
    }
    for (int i = 0; i < num; i++) {
        job->maxima[query + i] = lanes->max[i];
        job->sums[query + i] = lanes->sum[i];
    }
}

/* sums[w][r] += a[r][k] * b[w][k] for all k: r counts ROWS numbers, w vectors. */
INLINE void multiply(floats sums[WIDTH][ROWS], const float *a, int64_t row_stride, int64_t stride,
                     const floats *const b[WIDTH], int64_t count, const int width)
{
    for (int64_t k = 0; k < count; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
            for (int w = 0; w < width; w++)
                sums[w][r] += a[r * row_stride + k * stride] * b[w][k];
        }
    }
}

INLINE void score(const Scratch *scratch, Lanes *const lanes[WIDTH], int64_t head_dim, int64_t stride,
                  int64_t num_slots, const int width)
{
    const floats *q[WIDTH];
    for (int w = 0; w < width; w++)
        q[w] = lanes[w]->q;
    for (int64_t t = 0; t < num_slots; t += ROWS) {
        floats sums[WIDTH][ROWS] = {0};
        multiply(sums, scratch->key + t * stride, stride, 1, q, head_dim, width);
        for (int w = 0; w < width; w++)
            memcpy(lanes[w]->scores + t, sums[w], sizeof sums[w]);
    }
}

/* Hide what the queries do not see of the slots from `first` on. */
static void hide(Lanes *lanes, int64_t first, int64_t num_slots)
{
    integers lows, ends;
    memcpy(&lows, lanes->lows, sizeof lows);
    memcpy(&ends, lanes->ends, sizeof ends);
    for (int64_t t = 0; t < num_slots; t++) {
        int32_t slot = first + t;
        bits seen = (bits)((lows <= slot) & (ends > slot));
        floats hidden = all(-INFINITY);
        lanes->scores[t] = (floats)(((bits)lanes->scores[t] & seen) | ((bits)hidden & ~seen));
    }
}

/* Scores to weights; what was summed before is scaled to the new maximum. Returns the scale. */
static floats weigh(Lanes *lanes, int64_t num_slots)
{
    floats maxima[ROWS], max = lanes->max, sum = all(0);
    memcpy(maxima, lanes->scores, sizeof maxima);
    for (int64_t t = ROWS; t < num_slots; t += ROWS)
        for (int r = 0; r < ROWS; r++)
            maxima[r] = larger(maxima[r], lanes->scores[t + r]);
    for (int r = 0; r < ROWS; r++)
        max = larger(max, maxima[r]);
    for (int64_t t = 0; t < num_slots; t++) {
        lanes->scores[t] = exp2_all(lanes->scores[t] - max);
        sum += lanes->scores[t];
    }
    floats scale = exp2_all(lanes->max - max);
    lanes->sum = lanes->sum * scale + sum;
    lanes->max = max;
    return scale;
}

INLINE void sum_values(const Scratch *scratch, Lanes *const lanes[WIDTH], const floats scales[WIDTH],
                       int64_t head_dim, int64_t stride, int64_t num_slots, const int width)
{
    const floats *weights[WIDTH];
    for (int w = 0; w < width; w++)
        weights[w] = lanes[w]->scores;
    for (int64_t d = 0; d < head_dim; d += ROWS) {
        floats sums[WIDTH][ROWS];
#pragma GCC unroll 2
        for (int w = 0; w < width; w++)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                sums[w][r] = lanes[w]->out[d + r] * scales[w];
        multiply(sums, scratch->value + d, 1, stride, weights, num_slots, width);
        for (int w = 0; w < width; w++)
            memcpy(lanes[w]->out + d, sums[w], sizeof sums[w]);
    }
}

/* `width` groups of queries on the tile of slots [first, first + num_slots). */
INLINE void attend(const Job *job, const Scratch *scratch, Lanes *const lanes[WIDTH], int64_t first,
                   int64_t num_slots, int64_t stride, const int width)
{
    int64_t head_dim = job->step->head_dim, rounded = (num_slots + ROWS - 1) / ROWS * ROWS;
    floats scales[WIDTH];
    score(scratch, lanes, head_dim, stride, rounded, width);
    for (int w = 0; w < width; w++) {
        if (job->softcap)
            for (int64_t t = 0; t < rounded; t++)
                lanes[w]->scores[t] = capped(lanes[w]->scores[t], job->softcap);
        if (first < lanes[w]->low || first + rounded > lanes[w]->high)
            hide(lanes[w], first, rounded);
        scales[w] = weigh(lanes[w], rounded);
    }
    sum_values(scratch, lanes, scales, head_dim, stride, num_slots, width);
}

/* A tile of K or V as floats; the rows up to the next multiple of ROWS are 0. */
INLINE void widen_tile(const char *numbers, const int64_t *where, float *tile, int64_t num_slots, int64_t head_dim,
                       int64_t stride, const int is_half)
{
    for (int64_t t = 0; t < num_slots; t++) {
        float *row = tile + t * stride;
#pragma GCC unroll 4
        for (int64_t d = 0; d + LANES <= head_dim; d += LANES)
            *(floats *)(row + d) = load(numbers, where[t] + d, is_half);
        if (stride > head_dim)
            *(floats *)(row + head_dim - LANES) = load(numbers, where[t] + head_dim - LANES, is_half);
    }
    for (; num_slots % ROWS; num_slots++)
        memset(tile + num_slots * stride, 0, stride * sizeof *tile);
}

INLINE void attend_tiles(const Job *job, const int is_half)
{
    const Task *task = job->task;
    int64_t head_dim = job->step->head_dim, stride = num_vectors(head_dim) * LANES;
    int64_t num_queries = task->query1 - task->query0, num_groups = (num_queries + LANES - 1) / LANES;
    int64_t begin = task->num_slots, end = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t left = num_queries - g * LANES;
        Lanes *lanes = &scratch.lanes[g];
        start_lanes(job, lanes, task->query0 + g * LANES, left < LANES ? left : LANES, is_half);
        begin = lanes->begin < begin ? lanes->begin : begin;
        end = lanes->end > end ? lanes->end : end;
    }
    if (stride > head_dim) /* what pads a head is multiplied, too, though nobody reads it */
        for (int64_t t = 0; t < TILE; t++)
            memset(scratch.value + t * stride + head_dim, 0, (stride - head_dim) * sizeof(float));
    for (int64_t first = begin; first < end; first += TILE) {
        int64_t where[TILE], num_slots = end - first < TILE ? end - first : TILE;
        find_slots(job, first, num_slots, where);
        widen_tile(job->key, where, scratch.key, num_slots, head_dim, stride, is_half);
        widen_tile(job->value, where, scratch.value, num_slots, head_dim, stride, is_half);
        Lanes *waiting[WIDTH]; /* groups that see some of the tile, until there are enough of them */
        int num_waiting = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            Lanes *lanes = &scratch.lanes[g];
            if (first >= lanes->end || first + num_slots <= lanes->begin)
                continue;
            waiting[num_waiting++] = lanes;
            if (num_waiting == WIDTH) {
                attend(job, &scratch, waiting, first, num_slots, stride, WIDTH);
                num_waiting = 0;
            }
        }
        if (num_waiting)
            attend(job, &scratch, waiting, first, num_slots, stride, 1);
    }
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t left = num_queries - g * LANES;
        finish_lanes(job, &scratch.lanes[g], task->query0 + g * LANES, left < LANES ? left : LANES);
    }
}

void attend_many(const Job *job)
{
    if (job->step->is_half)
        attend_tiles(job, 1);
    else
        attend_tiles(job, 0);
}
