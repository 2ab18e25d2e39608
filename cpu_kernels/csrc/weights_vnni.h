// A tile of products of digits by the instruction that adds four products of bytes at once
// (AVX512-VNNI).
#pragma once

#include "weights_digits.h"

namespace {

// Twice the numbers of 4 bits (kTwiceE2M1), counted from -12.
inline __m512i counted_e2m1(__m512i codes) {
  const __m128i counted = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(counted), codes);
}

inline __m512i add_products(__m512i sum, __m512i codes, int32_t digits) {
  return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(digits));
}

// Call use(word, codes) for each word of inputs of a group, with codes that count from 0.
template <Code kCode, int kGroup, int V, class Use>
KVQ_INLINE void for_words(const char* codes, Use use) {
  if constexpr (kCode != Code::kByte) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int w = 0; w < kGroup / 8; w++, codes += 4 * kPanelOutputs) {
      __m512i lower[V], upper[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const __m512i packed = _mm512_loadu_si512(codes + 64 * v);
        lower[v] = _mm512_and_si512(packed, low);
        upper[v] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
      }
      __builtin_prefetch(codes + kAhead);
      __builtin_prefetch(codes + kAhead + 64);
      if constexpr (kCode == Code::kE2M1) {
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          lower[v] = counted_e2m1(lower[v]);
          upper[v] = counted_e2m1(upper[v]);
        }
      }
      use(w, lower);
      use(kGroup / 8 + w, upper);
    }
  } else {
    const __m512i half = _mm512_set1_epi8(int8_t(0x80));
#pragma GCC unroll 8
    for (int w = 0; w < kGroup / kInWord; w++, codes += 4 * kPanelOutputs) {
      __m512i counted[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++)
        counted[v] = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * v), half);
      __builtin_prefetch(codes + kAhead);
      __builtin_prefetch(codes + kAhead + 64);
      use(w, counted);
    }
  }
}

template <Code kCode, int kGroup, int D, int T, int S, int V>
KVQ_INLINE void multiply_tile(const PanelProduct& product, int64_t panel, int64_t lane,
                              const TokenBlock& block, int64_t first) {
  const PackedMatrix& weights = *product.weights;
  const int64_t groups = weights.inputs / kGroup;
  constexpr int64_t kBytes = kGroup * kPanelOutputs * bits_of(kCode) / 8;  // of a group
  const char* codes =
      static_cast<const char*>(weights.codes) + panel * groups * kBytes + lane * kInWord;
  Floats total[T][V] = {};
  for (int64_t g = 0; g < groups; g++, codes += kBytes) {
    const int32_t* digits = block.digits + (g * (kGroup / kInWord) * S + first) * D;
    const int32_t* starts = block.starts + (g * S + first) * 2;
    __m512i sums[D][T][V];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        sums[0][t][v] = _mm512_setzero_si512();
        if (D > 1) sums[D > 1 ? D - 2 : 0][t][v] = _mm512_set1_epi32(starts[2 * t]);
        sums[D - 1][t][v] = _mm512_set1_epi32(starts[2 * t + 1]);
      }
    for_words<kCode, kGroup, V>(
        codes, [&](int word, const __m512i* counted) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int t = 0; t < T; t++)
#pragma GCC unroll 3
            for (int d = 0; d < D; d++) {
              const int32_t digit = digits[(word * S + t) * D + d];
#pragma GCC unroll 2
              for (int v = 0; v < V; v++)
                sums[d][t][v] = add_products(sums[d][t][v], counted[v], digit);
            }
        });
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      const int64_t at = lane + v * kLanes;
      const Floats scale = scales_at(weights.scales, panel, groups, g, kGroup, at);
      const Floats least = weights.mins.fine
                               ? minima_at(weights.mins, panel, groups, g, kGroup, at, scale)
                               : Floats{};
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        Floats sum = (Floats)_mm512_cvtepi32_ps(sums[D - 1][t][v]);
        if constexpr (D == 3) {
          const __m512i above =
              _mm512_add_epi32(_mm512_slli_epi32(sums[0][t][v], 8), sums[1][t][v]);
          sum += (Floats)_mm512_cvtepi32_ps(above) * 256.0f;
        }
        total[t][v] += scale * splat(block.scales[g * S + first + t]) * sum;
        if (weights.mins.fine) total[t][v] += least * splat(block.sums[g * S + first + t]);
      }
    }
  }
  put_tile<T, V>(product, panel, lane, block, first, total);
}

inline bool reads_digits(const PackedMatrix& weights, int64_t) { return weights.integers(); }

template <int D>
inline void multiply_bits(const PanelProduct& product) {
  const PackedMatrix& weights = *product.weights;
  if (weights.e2m1()) multiply_digits<Code::kE2M1, 32, D>(product);
  else if (weights.bits == 4) multiply_digits<Code::kNibble, 32, D>(product);
  else if (weights.group == 32) multiply_digits<Code::kByte, 32, D>(product);
  else multiply_digits<Code::kByte, 16, D>(product);
}

inline void multiply_by_digits(const PanelProduct& product) {
  if (!product.weights->integers()) multiply_numbers(product);
  else if (product.digits == 1) multiply_bits<1>(product);
  else multiply_bits<3>(product);
}

}  // namespace
