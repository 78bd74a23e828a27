/* Attention of one layer of a step: write K and V, attend in parts, merge the parts. */
#include <math.h>

#include "attention.h"

#define MANY_TOKENS 64 /* the copies of fewer are done before other threads have woken up */

/* Copy K or V of a token, all heads, to its slot. */
static void write_token(const Step *step, char *to, Heads from, int64_t token)
{
    int64_t slot = step->slots[token], size = step->is_half ? 2 : 4;
    int64_t start = slot / step->block_size * step->block_stride + slot % step->block_size * step->head_dim;
    for (int64_t head = 0; head < step->num_kv_heads; head++)
        memcpy(to + (start + head * step->head_stride) * size,
               from.numbers + (token * from.token_stride + head * from.head_stride) * size, step->head_dim * size);
}

/* Softmax over the union of the parts of a token's query heads of one KV head, and of a sink if there are any:
 * with M the largest maximum, each part weighs 2^(max - M). */
INLINE void merge(const Step *step, int64_t token, int64_t kv_head, const float *sinks, char *out, const int is_half)
{
    int64_t head_dim = step->head_dim, group = step->group;
    const int32_t *parts = step->parts + step->part_starts[token];
    int64_t num_parts = step->part_starts[token + 1] - step->part_starts[token];
    int64_t first = kv_head * step->num_parts;
    for (int64_t i = 0; i < group; i++) {
        int64_t head = kv_head * group + i;
        float sink = sinks ? sinks[head] * LOG2_E : LOWEST, max = sink, sum = 0;
        for (int64_t p = 0; p < num_parts; p++)
            max = fmaxf(max, step->part_maxima[first + parts[p] + i]);
        floats sums[MAX_VECTORS] = {0};
        for (int64_t p = 0; p < num_parts; p++) {
            int64_t part = first + parts[p] + i;
            float weight = exp2f(step->part_maxima[part] - max);
            sum += weight * step->part_sums[part];
            for (int64_t v = 0; v < num_vectors(head_dim); v++)
                sums[v] += weight * *(floats *)(step->part_outs + part * head_dim + vector_start(v, head_dim));
        }
        if (sinks)
            sum += exp2f(sink - max);
        int64_t start = (token * step->num_kv_heads * group + head) * head_dim;
        for (int64_t v = 0; v < num_vectors(head_dim); v++)
            store(out, start + vector_start(v, head_dim), sums[v] / sum, is_half);
    }
}

/* Write K and V of the tokens that have a slot, then attend. q is [T, H, D] and k, v are [T, Hkv, D], each with
 * strides (in numbers) of its tokens and heads; out is [T, H, D], dense; sinks is [H] or null. */
void ramet_attend(const Step *step, int64_t layer, const char *q, int64_t q_token, int64_t q_head, const char *k,
                  int64_t k_token, int64_t k_head, const char *v, int64_t v_token, int64_t v_head, char *out,
                  float scale, float softcap, const float *sinks)
{
    int64_t size = step->is_half ? 2 : 4, num_heads = step->num_kv_heads;
    char *key = step->storage + layer * step->layer_stride * size, *value = key + step->value_stride * size;
    Heads keys = {k, k_token, k_head}, values = {v, v_token, v_head};
#pragma omp parallel for num_threads(step->num_threads) if (step->num_tokens > MANY_TOKENS)
    for (int64_t token = 0; token < step->num_tokens; token++)
        if (step->slots[token] >= 0) {
            write_token(step, key, keys, token);
            write_token(step, value, values, token);
        }
#pragma omp parallel num_threads(step->num_threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < step->num_tasks * num_heads; i++) {
            const Task *task = step->tasks + i / num_heads;
            int64_t head = i % num_heads, part = head * step->num_parts + task->part0;
            Job job = {
                .step = step,
                .task = task,
                .key = key + head * step->head_stride * size,
                .value = value + head * step->head_stride * size,
                .queries = {q + head * step->group * q_head * size, q_token, q_head},
                .outs = step->part_outs + part * step->head_dim,
                .maxima = step->part_maxima + part,
                .sums = step->part_sums + part,
                .scale = scale * LOG2_E,
                .softcap = softcap * LOG2_E,
            };
            if (task->query1 - task->query0 <= MAX_FEW && task->num_slots <= MAX_FEW_SLOTS)
                attend_few(&job);
            else
                attend_many(&job);
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < step->num_tokens * num_heads; i++) {
            if (step->is_half)
                merge(step, i / num_heads, i % num_heads, sinks, out, 1);
            else
                merge(step, i / num_heads, i % num_heads, sinks, out, 0);
        }
    }
}
