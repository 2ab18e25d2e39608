// Vectors of the widest registers that the translation unit is compiled for, by the compiler's
// vector extension.
//
// Everything here has internal linkage: two translation units compiled for different processors
// must never share a function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
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

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline Floats splat(float x) { return x - Floats{}; }

// The 16-bit words from p on, as 32-bit numbers, by one instruction that compilers do not generate
// for __builtin_convertvector.
inline Uints load_words(const uint16_t* p) {
#if defined(__AVX512F__)
  __m256i x;
  std::memcpy(&x, p, sizeof x);
  return (Uints)_mm512_cvtepu16_epi32(x);
#elif defined(__AVX2__)
  __m128i x;
  std::memcpy(&x, p, sizeof x);
  return (Uints)_mm256_cvtepu16_epi32(x);
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Uints);
#endif
}

// 32-bit numbers that lie at any 16-bit word.
inline Ints load_ints(const int16_t* p) {
  Ints x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// sum + a_0 b_0 + a_1 b_1 in each lane, with a_i the signed halves of `a`, and two words from b on.
inline Ints add_pairs(Ints sum, Ints a, const int16_t* b) {
  int32_t both;
  std::memcpy(&both, b, sizeof both);
#if defined(__AVX512F__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(both));
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(both));
#elif defined(__SSE2__)
  return sum + (Ints)_mm_madd_epi16((__m128i)a, _mm_set1_epi32(both));
#else
  return sum + (a << 16 >> 16) * b[0] + (a >> 16) * b[1];
#endif
}

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline Floats to_float(Uints x) { return __builtin_convertvector((Ints)x, Floats); }

inline Floats choose(Ints condition, Floats a, Floats b) {
  return (Floats)((condition & (Ints)a) | (~condition & (Ints)b));
}

// max(a, b), and b if a is NaN, by one instruction that compilers do not generate for `choose`.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}

// NaN for NaN, and 0 for numbers: the weights of scores of which none is a number above -1e30.
inline Floats only_nan(Floats x) { return (Floats)((Ints)x & (x != x)); }

// The floats with these fp16 bits, exactly. Processors may be set to flush subnormal fp32 numbers,
// so no computation uses any.
inline Floats from_half(Uints bits) {
  const Uints magnitude = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
  // Subnormal numbers are multiples of 2^-24.
  const Floats small = to_float(magnitude) * 5.9604644775390625e-8f;
  const Uints exponent =
      (magnitude << 13) + ((Uints)(magnitude >= 0x7C00) & (112u << 23)) + (112u << 23);
  const Floats value = choose((Ints)(magnitude < 0x400), small, (Floats)exponent);
  return (Floats)((Uints)value | sign);
}

// The floats whose 16 bits are stored from p on.
inline Floats load_halves(const uint16_t* p, bool bfloat16) {
  if (bfloat16) return (Floats)(load_words(p) << 16);
#if defined(__AVX512F__)
  __m256i x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)_mm512_cvtph_ps(x);
#elif defined(__F16C__)
  __m128i x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)_mm256_cvtph_ps(x);
#else
  return from_half(load_words(p));
#endif
}

// The same for one float.
inline float load_half(const uint16_t* p, bool bfloat16) {
  if (bfloat16) return as_float(uint32_t(*p) << 16);
#if defined(__F16C__)
  return _cvtsh_ss(*p);
#else
  return from_half(Uints{} + uint32_t(*p))[0];
#endif
}

// The E4M3 numbers in the highest byte of each word, which must not be NaN: 2^(e - 7) (1 + m / 8),
// or m 2^-9 if e is 0.
inline Floats from_e4m3(Uints word) {
  const Uints size = (word >> 24) & 127;
  const Floats normal = (Floats)((size << 20) + (120u << 23)),
               subnormal = to_float(size) * 0.001953125f;
  return (Floats)((Uints)choose((Ints)(size < 8), subnormal, normal) | (word & 0x80000000u));
}

constexpr float kRounding = 12582912.0f;  // 3 * 2^22: added and subtracted, it rounds

// exp(x) for x <= 0, to 2 units in the last place, 0 from -87 down, and NaN for NaN.
inline Floats exp_of(Floats x) {
  const Ints vanishes = x <= -87.0f;
  x = larger(splat(-87.0f), x);  // NaN stays NaN
  const Floats n = (x * 1.44269504088896341f + kRounding) - kRounding;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)(~vanishes & (Ints)(p * (Floats)power));
}

// (a & mask) | b, by one AVX-512 instruction that compilers do not generate for a chain of them.
inline Uints masked_or(Uints a, Uints mask, Uints b) {
#if defined(__AVX512F__)
  return (Uints)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)mask, (__m512i)b, 0xEA);
#else
  return (a & mask) | b;
#endif
}

// The first `count` of kLanes words from p on. The others are 0, and not read.
inline Uints load_some_words(const uint16_t* p, int64_t count) {
  uint16_t words[kLanes] = {};
  std::memcpy(words, p, sizeof(uint16_t) * size_t(count));
  return load_words(words);
}

// Lanes 1, 0, 3, 2, ...
inline Floats swap_pairs(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permute_ps((__m512)x, 0xB1);
#elif defined(__AVX2__)
  return (Floats)_mm256_permute_ps((__m256)x, 0xB1);
#else
  return Floats{x[1], x[0], x[3], x[2]};
#endif
}

// The largest lane, and the sum of the lanes, by halves.
#if defined(__AVX2__)
inline __m256 upper_half(Floats x) {
#if defined(__AVX512F__)
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1));
#else
  return (__m256)x;
#endif
}

inline __m256 lower_half(Floats x) {
#if defined(__AVX512F__)
  return _mm512_castps512_ps256((__m512)x);
#else
  return (__m256)x;
#endif
}

inline float largest_lane(Floats x) {
  const __m256 eight = _mm256_max_ps(lower_half(x), upper_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline float sum_of_lanes(Floats x) {
  const __m256 eight = kLanes == 16 ? _mm256_add_ps(lower_half(x), upper_half(x)) : lower_half(x);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float largest_lane(Floats x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

inline float sum_of_lanes(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
#endif

// sums[i] = the sum of the lanes of parts[i], for 8 vectors.
inline void add_lanes(const Floats* parts, float* sums) {
#if defined(__AVX2__)
  __m256 a[8];
  for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
    a[i] = _mm256_add_ps(lower_half(parts[i]), upper_half(parts[i]));
#else
    a[i] = (__m256)parts[i];
#endif
  }
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                                       _mm256_permute2f128_ps(low, high, 0x31)));
#else
  for (int i = 0; i < 8; i++) sums[i] = (parts[i][0] + parts[i][1]) + (parts[i][2] + parts[i][3]);
#endif
}

// A number of bits by which all lanes are shifted: SSE2 and NEON cannot shift each lane by its own.
#if defined(__AVX2__)
typedef Uints Shift;
inline Shift shift_by(int32_t bits) { return Uints{} + uint32_t(bits); }
#else
typedef int32_t Shift;
inline Shift shift_by(int32_t bits) { return bits; }
#endif

// A table of 16 entries. Of a code, the lowest 4 bits alone are looked at.
struct Table {
#if defined(__AVX512F__)
  __m512 entries;
  explicit Table(const float* p) : entries(_mm512_loadu_ps(p)) {}
  Floats at(Uints code) const { return (Floats)_mm512_permutexvar_ps((__m512i)code, entries); }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
  Floats at(Uints code) const {
    const __m256i index = (__m256i)code;
    // The sign bit chooses the half.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return (Floats)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                    _mm256_permutevar8x32_ps(high, index), upper);
  }
#else
  const float* entries;
  explicit Table(const float* p) : entries(p) {}
  Floats at(Uints code) const {
    Floats entry;
    for (int i = 0; i < kLanes; i++) entry[i] = entries[code[i] & 15];
    return entry;
  }
#endif
};

}  // namespace
