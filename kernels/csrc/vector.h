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

/* exp of numbers up to 88, relative error below 2e-7; 0 below -87. Cephes' expf: 2^n times a polynomial. */
static inline floats exp_all(floats x)
{
    const floats zero = {0};
    floats low = zero - 87.0f;
    bits is_low = (bits)(x < low);
    x = (floats)(((bits)x & ~is_low) | ((bits)low & is_low));
    floats n = x * 1.44269504088896341f;
    n = (n + 12582912.0f) - 12582912.0f; /* to the nearest integer: 1.5 * 2^23 has no fraction bits */
    floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    floats y = p * r * r + r + 1.0f;
    bits power = (bits)(__builtin_convertvector(n, integers) + 127) << 23;
    return (floats)((bits)(y * (floats)power) & ~is_low);
}

#endif
