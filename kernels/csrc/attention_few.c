/* A few queries on a stretch of KV, such as a decoding row's own: vectors run along the head. */
#include <math.h>

#include "attention.h"

#define QUERIES 4 /* at a time: with as many tokens, 16 sums in registers */
#define TOKENS 4
#define AHEAD 24

/* The sums of four vectors, as the first four numbers of one. */
INLINE floats sum_each(const floats x[TOKENS])
{
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
    floats a = LOW(x[0], x[1]) + HIGH(x[0], x[1]);
    floats b = LOW(x[2], x[3]) + HIGH(x[2], x[3]);
    floats sums = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
                + SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    sums += SHUFFLE(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    return sums + SHUFFLE(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#undef LOW
#undef HIGH
}

/* scores[q][t] of `num` queries, [num][vectors] of q, and all slots, their number rounded up to TOKENS. */
INLINE void score(const Job *job, const floats q[QUERIES][MAX_VECTORS], const int64_t *where,
                  float scores[QUERIES][MAX_FEW_SLOTS], const int num, const int is_half)
{
    int64_t head_dim = job->step->head_dim, vectors = num_vectors(head_dim);
    for (int64_t t = 0; t < job->task->num_slots; t += TOKENS) {
        floats sums[QUERIES][TOKENS] = {0};
        for (int i = 0; i < TOKENS; i++) {
            int64_t ahead = t + i + AHEAD;
            ask_for(job->key, where[ahead < job->task->num_slots ? ahead : t], head_dim, is_half);
            ask_for(job->value, where[t + i], head_dim, is_half);
        }
        for (int64_t v = 0; v < vectors; v++) {
            int64_t start = vector_start(v, head_dim);
#pragma GCC unroll 4
            for (int i = 0; i < TOKENS; i++) {
                floats key = load(job->key, where[t + i] + start, is_half);
#pragma GCC unroll 4
                for (int j = 0; j < num; j++)
                    sums[j][i] += key * q[j][v];
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < num; j++) {
            floats four = sum_each(sums[j]);
            memcpy(&scores[j][t], &four, TOKENS * sizeof(float));
        }
    }
}

/* Turn the scores of one query into weights, those of what it does not see into 0. */
static void weigh(const Job *job, int64_t query, float *scores)
{
    const Step *step = job->step;
    int64_t num_slots = job->task->num_slots, token = token_of(job, query);
    int64_t low = step->lows[token] - job->task->position, end = step->ends[token] - job->task->position;
    int64_t rounded = (num_slots + LANES - 1) / LANES * LANES;
    for (int64_t t = 0; t < low && t < num_slots; t++)
        scores[t] = -INFINITY;
    for (int64_t t = end < 0 ? 0 : end < num_slots ? end : num_slots; t < rounded; t++)
        scores[t] = -INFINITY;
    floats maxima = all(LOWEST), sums = all(0);
    for (int64_t t = 0; t < rounded; t += LANES) {
        floats x = *(floats *)(scores + t);
        if (job->softcap) {
            floats cap = capped(x, job->softcap);
            bits seen = (bits)(x > -INFINITY);
            x = (floats)(((bits)cap & seen) | ((bits)x & ~seen));
            *(floats *)(scores + t) = x;
        }
        maxima = larger(maxima, x);
    }
    float max = LOWEST, sum = 0;
    for (int i = 0; i < LANES; i++)
        max = maxima[i] > max ? maxima[i] : max;
    for (int64_t t = 0; t < rounded; t += LANES) {
        floats weights = exp2_all(*(floats *)(scores + t) - max);
        *(floats *)(scores + t) = weights;
        sums += weights;
    }
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    job->maxima[query] = max;
    job->sums[query] = sum;
}

/* `width` vectors, from `first` on, of the weighted sums of values. */
INLINE void sum_values(const Job *job, int64_t query, const int64_t *where, const float weights[QUERIES][MAX_FEW_SLOTS],
                       int64_t first, const int width, const int num, const int is_half)
{
    int64_t head_dim = job->step->head_dim, num_slots = job->task->num_slots;
    floats sums[QUERIES][4] = {0};
    int64_t starts[4];
#pragma GCC unroll 4
    for (int v = 0; v < width; v++)
        starts[v] = vector_start(first + v, head_dim);
    for (int64_t t = 0; t < num_slots; t++) {
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) {
            floats value = load(job->value, where[t] + starts[v], is_half);
#pragma GCC unroll 4
            for (int j = 0; j < num; j++)
                sums[j][v] += weights[j][t] * value;
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < num; j++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++)
            *(floats *)(job->outs + (query + j) * head_dim + starts[v]) = sums[j][v];
}

INLINE void attend(const Job *job, int64_t query, const int64_t *where, const int num, const int is_half)
{
    int64_t head_dim = job->step->head_dim, vectors = num_vectors(head_dim), v = 0;
    floats q[QUERIES][MAX_VECTORS];
    float scores[QUERIES][MAX_FEW_SLOTS];
    for (int j = 0; j < num; j++) {
        int64_t start = query_start(job, query + j);
        for (v = 0; v < vectors; v++)
            q[j][v] = load(job->queries.numbers, start + vector_start(v, head_dim), is_half) * job->scale;
        for (int i = 0; i < vectors * LANES - head_dim; i++)
            q[j][vectors - 1][i] = 0; /* what the last vector has in common with the one before counts once */
    }
    score(job, q, where, scores, num, is_half);
    for (int j = 0; j < num; j++)
        weigh(job, query + j, scores[j]);
    for (v = 0; v + 4 <= vectors; v += 4)
        sum_values(job, query, where, scores, v, 4, num, is_half);
    for (; v < vectors; v++)
        sum_values(job, query, where, scores, v, 1, num, is_half);
}

#define ATTEND(num)                                      \
    case num:                                            \
        if (job->step->is_half)                          \
            attend(job, query, where, num, 1);           \
        else                                             \
            attend(job, query, where, num, 0);           \
        break

void attend_few(const Job *job)
{
    int64_t where[MAX_FEW_SLOTS + TOKENS], num_slots = job->task->num_slots;
    find_slots(job, 0, num_slots, where);
    for (int i = 0; i < TOKENS; i++)
        where[num_slots + i] = where[num_slots - 1]; /* slots are read by fours; the surplus gets no weight */
    for (int64_t query = job->task->query0; query < job->task->query1; query += QUERIES) {
        int64_t left = job->task->query1 - query;
        switch (left < QUERIES ? left : QUERIES) {
            ATTEND(1);
            ATTEND(2);
            ATTEND(3);
            ATTEND(4);
        }
    }
}
