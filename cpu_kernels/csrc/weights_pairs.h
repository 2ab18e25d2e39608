// A tile of products of one digit by the instruction that adds two products of bytes (AVX2).
//
// Its sums have 16 bits. Those of a group of codes of 4 bits fit: 16 products of 15 and 127 are
// 30,480. Codes of 8 bits, and three digits, take longer than floats do.
#pragma once

#include "weights_digits.h"

namespace {

// Twice the numbers of 4 bits (kTwiceE2M1), counted from -12.
inline __m256i counted_e2m1(__m256i codes) {
  const __m128i counted = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(counted), codes);
}

template <Code kCode, int kGroup, int D, int T, int S, int V>
KVQ_INLINE void multiply_tile(const PanelProduct& product, int64_t panel, int64_t lane,
                              const TokenBlock& block, int64_t first) {
  static_assert(kCode != Code::kByte && D == 1);
  constexpr int kWords = kGroup / 8;
  constexpr int64_t kBytes = kGroup * kPanelOutputs / 2;  // of a group
  const __m256i low = _mm256_set1_epi8(15);
  const PackedMatrix& weights = *product.weights;
  const int64_t groups = weights.inputs / kGroup;
  const char* codes =
      static_cast<const char*>(weights.codes) + panel * groups * kBytes + lane * kInWord;
  Floats total[T][V] = {};
  for (int64_t g = 0; g < groups; g++, codes += kBytes) {
    const int32_t* digits = block.digits + g * (kGroup / kInWord) * S + first;
    const int32_t* starts = block.starts + (g * S + first) * 2;
    __m256i pairs[T][V] = {};
    Ints sums[T][V];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[t][v] = Ints{} + starts[2 * t + 1];
    const auto add = [&](int word, const __m256i* counted) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const __m256i digit = _mm256_set1_epi32(digits[word * S + t]);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
          pairs[t][v] = _mm256_add_epi16(pairs[t][v], _mm256_maddubs_epi16(counted[v], digit));
      }
    };
    const auto widen = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          sums[t][v] += (Ints)_mm256_madd_epi16(pairs[t][v], _mm256_set1_epi16(1));
          pairs[t][v] = _mm256_setzero_si256();
        }
    };
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {  // the lower and the upper codes
#pragma GCC unroll 4
      for (int w = 0; w < kWords; w++) {
        const char* const word = codes + w * 4 * kPanelOutputs;
        __m256i counted[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          __m256i packed = _mm256_loadu_si256((const __m256i*)(word + 32 * v));
          if (half) packed = _mm256_srli_epi16(packed, 4);
          counted[v] = _mm256_and_si256(packed, low);
          if (kCode == Code::kE2M1) counted[v] = counted_e2m1(counted[v]);
        }
        if (!half) {
          __builtin_prefetch(word + kAhead);
          __builtin_prefetch(word + kAhead + 64);
        }
        add(half * kWords + w, counted);
      }
      if (kCode == Code::kE2M1 || half) widen();  // 16 products of 24 and 127 would not fit
    }
    // Not by Affine: with its arrays eight rows take half as long again.
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const int64_t at = lane + v * kLanes;
      const Floats scale = scales_at(weights.scales, panel, groups, g, kGroup, at);
      const Floats least = weights.mins.fine
                               ? minima_at(weights.mins, panel, groups, g, kGroup, at, scale)
                               : Floats{};
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        total[t][v] += scale * splat(block.scales[g * S + first + t]) * to_float((Uints)sums[t][v]);
        if (weights.mins.fine) total[t][v] += least * splat(block.sums[g * S + first + t]);
      }
    }
  }
  put_tile<T, V>(product, panel, lane, block, first, total);
}

inline bool reads_digits(const PackedMatrix& weights, int64_t digits) {
  return weights.integers() && weights.bits == 4 && digits == 1;
}

inline void multiply_by_digits(const PanelProduct& product) {
  const PackedMatrix& weights = *product.weights;
  if (!reads_digits(weights, product.digits)) multiply_by_floats(product);
  else if (weights.e2m1()) multiply_digits<Code::kE2M1, 32, 1>(product);
  else multiply_digits<Code::kNibble, 32, 1>(product);
}

}  // namespace
