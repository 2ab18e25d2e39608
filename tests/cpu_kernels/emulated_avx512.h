// The AVX-512 instructions of the kernels as loops, so that processors without them can run those
// kernels under sanitizers. It is included before all else.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1

namespace emulated {

template <class Lane, int kBytes = 64>
struct Lanes {
  typedef Lane Vector __attribute__((vector_size(kBytes)));
};
typedef Lanes<float>::Vector Floats;
typedef Lanes<int32_t>::Vector Ints;
typedef Lanes<uint16_t>::Vector Halves;
typedef Lanes<uint8_t>::Vector Bytes;
typedef Lanes<int8_t>::Vector SignedBytes;
typedef Lanes<int8_t, 16>::Vector FewBytes;
typedef Lanes<uint16_t, 32>::Vector FewHalves;

// The first bits of a vector, or what lies in memory, as another type.
template <class To, class From>
static To as(const From& from) {
  static_assert(sizeof(To) <= sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <class To>
static To at(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof to);
  return to;
}

// The vector whose lane i is lane(i).
template <class Vector, class To, class Lane>
static To lanes(Lane lane) {
  Vector x{};
  for (unsigned i = 0; i < sizeof x / sizeof x[0]; i++) x[i] = lane(i);
  return as<To>(x);
}

static __m512i add(__m512i a, __m512i b) { return (__m512i)((Ints)a + (Ints)b); }
static __m512i bits_of_both(__m512i a, __m512i b) { return (__m512i)((Ints)a & (Ints)b); }
static __m512i bits_of_one(__m512i a, __m512i b) { return (__m512i)((Ints)a ^ (Ints)b); }
static __m512i shifted_up(__m512i a, int bits) { return (__m512i)((Ints)a << bits); }
static __m512i shifted_down(__m512i a, int bits) { return (__m512i)((Halves)a >> bits); }
static __m512i repeated(int x) { return (__m512i)(Ints{} + x); }
static __m512i repeated_byte(int8_t x) { return (__m512i)(SignedBytes{} + x); }
static __m512 to_floats(__m512i a) { return (__m512) __builtin_convertvector((Ints)a, Floats); }

static __m512i masked_or(__m512i a, __m512i b, __m512i c, int table) {
  if (table != 0xEA) __builtin_trap();
  return (__m512i)(((Ints)a & (Ints)b) | (Ints)c);
}

static __m512i repeated_quarter(__m128i a) {
  return lanes<Bytes, __m512i>([&](unsigned i) { return ((FewBytes)a)[i % 16]; });
}

static __m128i lowest_bytes(__m512i a) {
  return lanes<FewBytes, __m128i>([&](unsigned i) { return int8_t(((Ints)a)[i]); });
}

static __m512i from_bytes(__m128i a) {
  return lanes<Ints, __m512i>([&](unsigned i) { return ((FewBytes)a)[i]; });
}

static __m512i from_words(__m256i a) {
  return lanes<Ints, __m512i>([&](unsigned i) { return ((FewHalves)a)[i]; });
}

static __m512 from_halves(__m256i a) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return lanes<Floats, __m512>([&](unsigned i) { return i < 8 ? low[i] : high[i - 8]; });
}

static __m512i nearest(__m512 a) {
  return lanes<Ints, __m512i>([&](unsigned i) { return _mm_cvtss_si32(_mm_set_ss(a[i])); });
}

static __m512 larger(__m512 a, __m512 b) {  // b if either is NaN
  return lanes<Floats, __m512>([&](unsigned i) { return a[i] > b[i] ? a[i] : b[i]; });
}

static __m512i add_products(__m512i sums, __m512i a, __m512i b) {
  return lanes<Ints, __m512i>([&](unsigned i) {
    int32_t sum = ((Ints)sums)[i];
    for (unsigned j = 4 * i; j < 4 * i + 4; j++) sum += ((Bytes)a)[j] * ((SignedBytes)b)[j];
    return sum;
  });
}

static __m512i products_of_pairs(__m512i a, __m512i b) {
  typedef Lanes<int16_t>::Vector SignedHalves;
  const SignedHalves x = (SignedHalves)a, y = (SignedHalves)b;
  return lanes<Ints, __m512i>(
      [&](unsigned i) { return x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; });
}

static __m256d half_of(__m512d a, int half) {
  return half ? __m256d{a[4], a[5], a[6], a[7]} : __m256d{a[0], a[1], a[2], a[3]};
}

static __m512i load_some(uint32_t mask, const void* p) {
  return lanes<Ints, __m512i>([&](unsigned i) {
    return mask >> i & 1 ? at<int32_t>(static_cast<const char*>(p) + 4 * i) : 0;
  });
}

static __m512 permuted(__m512 a, int places) {  // within four lanes
  return lanes<Floats, __m512>(
      [&](unsigned i) { return a[i / 4 * 4 + (places >> i % 4 * 2 & 3)]; });
}

static __m512 looked_up(__m512i places, __m512 table) {
  return lanes<Floats, __m512>([&](unsigned i) { return table[((Ints)places)[i] & 15]; });
}

static __m512i looked_up_bytes(__m512i table, __m512i places) {  // within 16 lanes
  return lanes<Bytes, __m512i>([&](unsigned i) {
    const uint8_t place = ((Bytes)places)[i];
    return place & 128 ? uint8_t(0) : ((Bytes)table)[i / 16 * 16 + place % 16];
  });
}

static int32_t sum_of(__m512i a) {
  uint32_t sum = 0;
  for (unsigned i = 0; i < 16; i++) sum += uint32_t(((Ints)a)[i]);
  return int32_t(sum);
}

}  // namespace emulated

#define _mm512_add_epi32 emulated::add
#define _mm512_and_si512 emulated::bits_of_both
#define _mm512_broadcast_i32x4 emulated::repeated_quarter
#define _mm512_castps512_ps256(a) emulated::as<__m256>(a)
#define _mm512_castps_pd(a) ((__m512d)(a))
#define _mm512_cvtepi32_epi8 emulated::lowest_bytes
#define _mm512_cvtepi32_ps emulated::to_floats
#define _mm512_cvtepi8_epi32 emulated::from_bytes
#define _mm512_cvtepu16_epi32 emulated::from_words
#define _mm512_cvtph_ps emulated::from_halves
#define _mm512_cvtps_epi32 emulated::nearest
#define _mm512_dpbusd_epi32 emulated::add_products
#define _mm512_extractf64x4_pd emulated::half_of
#define _mm512_loadu_ps emulated::at<__m512>
#define _mm512_loadu_si512 emulated::at<__m512i>
#define _mm512_maskz_loadu_epi32 emulated::load_some
#define _mm512_madd_epi16 emulated::products_of_pairs
#define _mm512_max_ps emulated::larger
#define _mm512_permute_ps emulated::permuted
#define _mm512_permutexvar_ps emulated::looked_up
#define _mm512_reduce_add_epi32 emulated::sum_of
#define _mm512_set1_epi32 emulated::repeated
#define _mm512_set1_epi8 emulated::repeated_byte
#define _mm512_setzero_si512() emulated::repeated(0)
#define _mm512_shuffle_epi8 emulated::looked_up_bytes
#define _mm512_slli_epi32 emulated::shifted_up
#define _mm512_srli_epi16 emulated::shifted_down
#define _mm512_ternarylogic_epi32 emulated::masked_or
#define _mm512_xor_si512 emulated::bits_of_one
