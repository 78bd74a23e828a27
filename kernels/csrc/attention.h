/* What the attention kernels have in common: a step's work, and one job of it. */
#ifndef RAMET_ATTENTION_H
#define RAMET_ATTENTION_H

#include <stddef.h>

#include "vector.h"

#define INLINE static inline __attribute__((always_inline))
#define MAX_HEAD_DIM 256
#define MAX_VECTORS (MAX_HEAD_DIM / LANES)
#define MAX_FEW 12       /* queries of a task that go to attend_few, */
#define MAX_FEW_SLOTS 256 /* which keeps their scores of so many slots */
#define MAX_MANY 128     /* queries of a task that go to attend_many */
#define LOWEST -1e30f    /* below every score, and finite: a query that sees nothing must not become NaN */

/* Slots of a row, consecutive positions, and queries that see some of them. The queries of a task are numbered:
 * query i is query head i % group (of each KV head) of token token0 + i / group. */
typedef struct {
    int32_t block;     /* where in `blocks` the id of the first slot's block stands */
    int32_t offset;    /* the first slot in that block */
    int32_t num_slots;
    int32_t position;  /* of the first slot */
    int32_t token0;
    int32_t query0;    /* queries query0 */
    int32_t query1;    /* to query1 */
    int32_t part0;     /* the partial result of query 0; that of query i is i further */
} Task;

/* One step: what all its layers have in common. ramet.kernels.cpu_native fills it in. T tokens, Hkv KV heads,
 * D numbers a head, P partial results a KV head. */
typedef struct {
    const Task *tasks;
    const int32_t *blocks;
    const int32_t *lows;        /* [T] a token sees positions from here */
    const int32_t *ends;        /* [T] to here */
    const int64_t *slots;       /* [T] where its K and V go, or -1 */
    const int32_t *part_starts; /* [T + 1] its partial results are parts[part_starts[t]] and so on, */
    const int32_t *parts;       /* each the number of the first of its group's queries */
    float *part_outs;           /* [Hkv, P, D] sums of values weighted by 2^(score - max) */
    float *part_maxima;         /* [Hkv, P] */
    float *part_sums;           /* [Hkv, P] sums of the weights */
    char *storage;              /* K and V of all layers; strides count numbers, not bytes */
    int64_t layer_stride, value_stride, head_stride, block_stride;
    int64_t num_tasks, num_tokens, num_parts, num_kv_heads, group, head_dim, block_size;
    int64_t is_half;            /* bfloat16, else float */
    int64_t num_threads;
} Step;

/* A view of numbers: of tokens and heads of either type. */
typedef struct {
    const char *numbers;
    int64_t token_stride, head_stride;
} Heads;

/* One task for one KV head of one layer. */
typedef struct {
    const Step *step;
    const Task *task;
    const char *key, *value; /* of the layer and the head */
    Heads queries;           /* from the group's first head on */
    float *outs, *maxima, *sums; /* from query 0's on */
    float scale, softcap;    /* times log2(e), so that exp is a power of 2; a cap of 0 is none */
} Job;

void attend_few(const Job *job);
void attend_many(const Job *job);

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

INLINE floats load(const char *numbers, int64_t index, int is_half)
{
    if (is_half)
        return widen_all(*(const halves *)(numbers + 2 * index));
    return *(const floats *)(numbers + 4 * index);
}

INLINE void store(char *numbers, int64_t index, floats x, int is_half)
{
    if (is_half)
        *(halves *)(numbers + 2 * index) = narrow_all(x);
    else
        *(floats *)(numbers + 4 * index) = x;
}

/* The larger one; y where one is NaN. */
INLINE floats larger(floats x, floats y)
{
#ifdef __AVX512F__ /* one instruction, for which gcc 12 takes three */
    return (floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
    bits first = (bits)(x > y);
    return (floats)(((bits)x & first) | ((bits)y & ~first));
#endif
}

INLINE floats all(float x)
{
    const floats zero = {0};
    return zero + x;
}

/* Where vector `index` of a head starts. The last one of a head size that is no multiple of 16 overlaps. */
INLINE int64_t vector_start(int64_t index, int64_t head_dim)
{
    int64_t start = index * LANES;
    return start + LANES <= head_dim ? start : head_dim - LANES;
}

INLINE int64_t num_vectors(int64_t head_dim)
{
    return (head_dim + LANES - 1) / LANES;
}

/* softcap * tanh(score / softcap) */
INLINE floats capped(floats scores, float softcap)
{
    floats doubled = scores * (2.0f * LOG2_E / softcap);
    doubled = -larger(all(-120.0f), -doubled); /* exp2 has an end, tanh is 1 there */
    return softcap - 2.0f * softcap / (exp2_all(doubled) + 1.0f);
}

/* Where in a layer's head the task's slots first to first + count lie. */
INLINE void find_slots(const Job *job, int64_t first, int64_t count, int64_t *where)
{
    const Step *step = job->step;
    int64_t slot = job->task->offset + first;
    const int32_t *block = step->blocks + job->task->block + slot / step->block_size;
    int64_t offset = slot % step->block_size;
    for (int64_t i = 0; i < count; block++, offset = 0) {
        int64_t start = *block * step->block_stride;
        for (; offset < step->block_size && i < count; offset++)
            where[i++] = start + offset * step->head_dim;
    }
}

/* Ask for a row of K or V before it is needed. Blocks lie anywhere, so the processor does not foresee the next. */
INLINE void ask_for(const char *numbers, int64_t start, int64_t head_dim, const int is_half)
{
    int64_t size = is_half ? 2 : 4;
    for (int64_t byte = 0; byte < head_dim * size; byte += 64)
        __builtin_prefetch(numbers + start * size + byte, 0, 2);
}

INLINE int64_t token_of(const Job *job, int64_t query)
{
    return job->task->token0 + query / job->step->group;
}

/* Where the numbers of a query start. */
INLINE int64_t query_start(const Job *job, int64_t query)
{
    return token_of(job, query) * job->queries.token_stride + query % job->step->group * job->queries.head_stride;
}

#endif
