/* Products of a few rows with bfloat16 weights: each weight is read once, widened, and used for all rows.
 *
 * A weight [K, N] lies in panels of 32 columns. For each k a panel holds 16 pairs, column c in the lower and
 * column c + 16 in the upper half of a word: a shift and a mask widen it. A row's sum runs over k in order,
 * whatever rows are beside it. */
#include <math.h>

#include "vector.h"

#define PANEL 32
#define MAX_TILE 12 /* rows at once: two sums each, in registers */
#define AHEAD 2048  /* bytes of weights that are asked for early */

typedef bits panel_row;

/* sums[r] = x[r] * panel for R rows: x [R][stride]. */
#define DEFINE_TILE(R)                                                                                    \
    static void tile_##R(const float *x, long stride, const panel_row *w, long k_end, floats (*sums)[2]) \
    {                                                                                                     \
        floats s[R][2];                                                                                   \
        for (int r = 0; r < R; r++)                                                                       \
            s[r][0] = s[r][1] = (floats){0};                                                              \
        for (long k = 0; k < k_end; k++) {                                                                \
            __builtin_prefetch((const char *)(w + k) + AHEAD);                                            \
            floats low = (floats)(w[k] << 16), high = (floats)(w[k] & 0xffff0000u);                       \
            for (int r = 0; r < R; r++) {                                                                 \
                s[r][0] += x[r * stride + k] * low;                                                       \
                s[r][1] += x[r * stride + k] * high;                                                      \
            }                                                                                             \
        }                                                                                                 \
        memcpy(sums, s, sizeof s);                                                                        \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)

typedef void tile(const float *, long, const panel_row *, long, floats (*)[2]);
static tile *const tiles[] = {0,      tile_1, tile_2, tile_3, tile_4,  tile_5, tile_6,
                              tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

/* Where the rows of a product come from, see `multiply`. */
enum { PLAIN, NORMED, GATED };

static void fill_plain(const uint16_t *x, float *out, long k_end)
{
    for (long k = 0; k < k_end; k += LANES)
        *(floats *)(out + k) = widen_all(*(const halves *)(x + k));
}

/* RMS norm (Zhang and Sennrich 2019, eq. 4). */
static void fill_normed(const uint16_t *x, const float *weight, float eps, float *out, long k_end)
{
    floats squares = {0};
    for (long k = 0; k < k_end; k += LANES) {
        floats part = widen_all(*(const halves *)(x + k));
        squares += part * part;
    }
    float mean = 0;
    for (int i = 0; i < LANES; i++)
        mean += squares[i];
    float factor = 1 / sqrtf(mean / k_end + eps);
    for (long k = 0; k < k_end; k += LANES)
        *(floats *)(out + k) = widen_all(*(const halves *)(x + k)) * factor * *(const floats *)(weight + k);
}

/* silu(gate) * up, with the gates before the ups in a row (Shazeer 2020, SwiGLU). */
static void fill_gated(const uint16_t *x, float *out, long k_end)
{
    for (long k = 0; k < k_end; k += LANES) {
        floats gate = widen_all(*(const halves *)(x + k)), up = widen_all(*(const halves *)(x + k_end + k));
        bits closed = (bits)(gate < -87.0f); /* less than 1e-35 passes */
        floats minus = (floats)((bits)-gate & ~closed);
        *(floats *)(out + k) = (floats)((bits)(gate / (1.0f + exp2_all(LOG2_E * minus))) & ~closed) * up;
    }
}

/* out [M, N] = rows [M, K] * weight [K, N] + bias [N] + residual [M, N], bias and residual if not null.
 *
 * The rows are x [M, K] as they are (PLAIN), normalised and times norm [K] (NORMED), or silu(gate) * up of
 * x [M, 2 K] (GATED). scratch holds M * K floats. K is a multiple of 16 and N one of 32. */
void ramet_multiply(const uint16_t *x, int source, const float *norm, float eps, const panel_row *weight,
                    const float *bias, const uint16_t *residual, uint16_t *out, float *scratch, long M, long K,
                    long N)
{
    if (!M)
        return;
    long num_tiles = (M + MAX_TILE - 1) / MAX_TILE;
    long height = (M + num_tiles - 1) / num_tiles;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long m = 0; m < M; m++) {
            float *row = scratch + m * K;
            if (source == PLAIN)
                fill_plain(x + m * K, row, K);
            else if (source == NORMED)
                fill_normed(x + m * K, norm, eps, row, K);
            else
                fill_gated(x + m * 2 * K, row, K);
        }
#pragma omp for schedule(static)
        for (long p = 0; p < N / PANEL; p++) {
            for (long m = 0; m < M; m += height) {
                long rows = M - m < height ? M - m : height;
                floats sums[MAX_TILE][2];
                tiles[rows](scratch + m * K, K, weight + p * K, K, sums);
                for (long r = 0; r < rows; r++)
                    for (int side = 0; side < 2; side++) {
                        long column = p * PANEL + side * LANES, at = (m + r) * N + column;
                        floats sum = sums[r][side];
                        if (bias)
                            sum += *(const floats *)(bias + column);
                        if (residual)
                            sum += widen_all(*(const halves *)(residual + at));
                        *(halves *)(out + at) = narrow_all(sum);
                    }
            }
        }
    }
}
