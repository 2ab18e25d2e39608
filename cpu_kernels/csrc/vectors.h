// Vectors of the widest registers that the translation unit is compiled for, by the compiler's vector extension.
//
// Everything here has internal linkage: two translation units compiled for different processors must never share a function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2, NEON
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Uints __attribute__((vector_size(4 * kLanes)));

// Words that are unpacked together. They hold neighbouring channels, and become floats in the order of `position`.
constexpr int kWords = kLanes == 16 ? 16 : 2 * kLanes;
typedef uint16_t Words __attribute__((vector_size(2 * kWords)));

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline Floats splat(float x) { return x - Floats{}; }

inline Words load_words(const uint16_t* p) {
  Words x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Where channel c stands among the floats of a token: of every kWords channels, those of even words come before those of odd ones, because
// either half of each pair of words is made a float by one instruction. With 16 lanes there is one for all words in their order.
inline int64_t position(int64_t c) {
  return kLanes == 16 ? c : c / kWords * kWords + c % 2 * kLanes + c % kWords / 2;
}

// The words as 32-bit numbers, in the upper halves (`high`) or the lower ones: part 0, and with fewer than 16 lanes part 1.
constexpr int kParts = kWords / kLanes;

inline Uints part_of(Words x, int part, bool high) {
#if defined(__AVX512F__)
  const Uints wide = __builtin_convertvector(x, Uints);
  return high && part == 0 ? wide << 16 : wide;
#else
  const Uints pairs = (Uints)x;
  if (part == 0) return high ? pairs << 16 : pairs & 0xFFFF;
  return high ? pairs & 0xFFFF0000u : pairs >> 16;
#endif
}

inline Floats to_float(Uints x) { return __builtin_convertvector((Ints)x, Floats); }

inline Floats choose(Ints condition, Floats a, Floats b) { return (Floats)((condition & (Ints)a) | (~condition & (Ints)b)); }

inline Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }

// The floats whose fp16 bits are given, exactly. Processors may be set to flush subnormal fp32 numbers, so none is computed with.
inline Floats from_half(Uints bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__F16C__)
  const __m256i x = (__m256i)bits;
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
  const Uints magnitude = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
  const Floats small = to_float(magnitude) * 5.9604644775390625e-8f;  // subnormal: a multiple of 2^-24
  const Uints exponent = (magnitude << 13) + ((Uints)(magnitude >= 0x7C00) & (112u << 23)) + (112u << 23);
  const Floats value = choose((Ints)(magnitude < 0x400), small, (Floats)exponent);
  return (Floats)((Uints)value | sign);
#endif
}

// The floats whose 16 bits are stored from p on, in their order.
inline Floats load_halves(const uint16_t* p, bool bfloat16) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves x;
  std::memcpy(&x, p, sizeof x);
  if (bfloat16) return (Floats)(__builtin_convertvector(x, Uints) << 16);
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
  return from_half(__builtin_convertvector(x, Uints));
#endif
}

// exp(x) for x <= 0, to 2 units in the last place; 0 below -87.
inline Floats exp_of(Floats x) {
  const Ints counts = x > -87.0f;
  x = larger(x, splat(-87.0f));
  const Floats n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)(counts & (Ints)(p * (Floats)power));
}

// sums[i] = the sum of the lanes of parts[i], for 8 vectors.
inline void add_lanes(const Floats* parts, float* sums) {
#if defined(__AVX2__)
  __m256 a[8];
  for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
    a[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)parts[i]),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)parts[i]), 1)));
#else
    a[i] = (__m256)parts[i];
#endif
  }
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
#else
  for (int i = 0; i < 8; i++) sums[i] = (parts[i][0] + parts[i][1]) + (parts[i][2] + parts[i][3]);
#endif
}

// table[code] of up to 16 entries; a table of fewer is padded to 16.
inline Floats look_up(const float* table, Uints code) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256i index = (__m256i)code;
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
  return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
  Floats found;
  for (int i = 0; i < kLanes; i++) found[i] = table[code[i]];
  return found;
#endif
}

}  // namespace
