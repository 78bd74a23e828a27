/* What the kernels have in common: vectors of 16 floats by the compiler's own extension, so that one source serves
 * every processor, and bfloat16 as what it is, the upper half of a float. */
#ifndef RAMET_VECTOR_H
#define RAMET_VECTOR_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define LOG2_E 1.44269504088896341f

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

static inline float widen(uint16_t half)
{
    uint32_t wide = (uint32_t)half << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
}

static inline floats widen_all(halves half)
{
#ifdef __AVX512F__ /* one instruction, for which gcc 12 takes four */
    return (floats)((bits)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
    return (floats)(__builtin_convertvector(half, bits) << 16);
#endif
}

/* To the nearest bfloat16, ties to even, as torch rounds. NaN stays NaN. */
static inline halves narrow_all(floats numbers)
{
    bits wide = (bits)numbers;
    bits rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    bits is_nan = (bits)(numbers != numbers);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
}

/* 2^x of numbers up to 127, relative error below 2e-7; 0 below -126, NaN for NaN. 2^n times a polynomial, fitted to
 * 2^r on [-1/2, 1/2] by weighted least squares (its own relative error is below 1e-7). */
static inline floats exp2_all(floats x)
{
    floats n = x + 12582912.0f; /* to the nearest integer, in the lowest bits: 1.5 * 2^23 has no fraction bits */
    floats r = x - (n - 12582912.0f);
    floats p = r * 1.326472672e-3f + 9.671512790e-3f;
    p = p * r + 5.550733745e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
    p = p * r + 1.0f;
    return (floats)(((bits)p + ((bits)n << 23)) & ~(bits)(x <= -126.0f));
}

#endif
