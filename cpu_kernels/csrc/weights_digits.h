// Products of packed weights with rows of activations by the instructions that add four products of
// bytes at once (AVX512-VNNI).
//
// A row becomes one or three digits of 8 bits for each input, to a scale for each group of inputs.
// Sums over a group are exact. With three digits an activation is off by at most 2^-23 of its
// group's largest, which is what sums of floats lose too.
#pragma once

#include <algorithm>

#include "vectors.h"
#include "weights.h"
#include "weights_panels.h"
#include "weights_scales.h"

namespace {

constexpr int kInWord = 4;  // inputs whose codes or digits lie in a word

enum class Code { kNibble, kE2M1, kByte };
constexpr int bits_of(Code code) { return code == Code::kByte ? 8 : 4; }

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

// y[t, lane ..] for T rows of a block of S, and V vectors of outputs from `lane` of a panel on.
template <Code kCode, int kGroup, int D, int T, int S, int V>
KVQ_INLINE void add_lanes(const PanelProduct& product, int64_t panel, int64_t lane,
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
  for (int t = 0; t < T && first + t < block.count; t++)
    for (int v = 0; v < V; v++)
      put_outputs(product, block.rows[first + t], panel * kPanelOutputs + lane + v * kLanes,
                  total[t][v]);
}

template <Code kCode, int kGroup, int D, int T, int S, int V>
inline void add_block(const PanelProduct& product, int64_t panel, const TokenBlock& block) {
  for (int64_t first = 0; first < std::min<int64_t>(S, block.count); first += T)
    for (int64_t lane = 0; lane < kPanelOutputs; lane += V * kLanes)
      add_lanes<kCode, kGroup, D, T, S, V>(product, panel, lane, block, first);
}

template <Code kCode, int kGroup, int D>
inline void multiply_digits(const PanelProduct& product) {
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b++) {
      const TokenBlock& block = product.blocks[b];
      switch (block.width) {
        case 1:
          add_block<kCode, kGroup, D, 1, 1, 2>(product, panel, block);
          break;
        case 2:
          add_block<kCode, kGroup, D, 2, 2, 2>(product, panel, block);
          break;
        case 4:
          add_block<kCode, kGroup, D, 4, 4, 2>(product, panel, block);
          break;
        default:  // sums of three digits of 8 rows and two vectors would not fit the registers
          add_block<kCode, kGroup, D, 8, 8, D == 1 ? 2 : 1>(product, panel, block);
      }
    }
}

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

// Digits of a group of a row. A group with entries that are not finite has a scale that is none.
template <int D>
inline void group_to_digits(const DigitRows& rows, const float* x, int64_t g, int64_t t) {
  constexpr float kMost = D == 1 ? 127.0f : 127.0f * 65536;
  const int64_t vectors = rows.group / kLanes, at = g * rows.width + t;
  __m512 entries[2], largest = _mm512_setzero_ps();
  __mmask16 all_finite = 0xFFFF;
  for (int64_t i = 0; i < vectors; i++) {
    entries[i] = _mm512_loadu_ps(x + g * rows.group + i * kLanes);
    const __m512 size = _mm512_abs_ps(entries[i]);
    all_finite &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
    largest = _mm512_max_ps(largest, size);
  }
  const bool finite = all_finite == 0xFFFF;
  const float most = finite ? _mm512_reduce_max_ps(largest) : 0;
  // Groups of tiny numbers count as 0: 1 / scale has to be a number.
  const float scale = most > 1e-30f ? most / kMost : 0;
  const __m512 factor = _mm512_set1_ps(scale > 0 ? kMost / most : 0);
  const __mmask16 counted = finite ? 0xFFFF : 0;
  __m512i above = _mm512_setzero_si512(), all = above;
  for (int64_t i = 0; i < vectors; i++) {
    __m512i digits[3];
    const __m512i whole = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(counted, entries[i], factor));
    all = _mm512_add_epi32(all, whole);
    digits[D - 1] = whole;
    if constexpr (D == 3) {  // the lowest 8 bits of each, and what they leave
      const auto rest = [](__m512i number) {
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
        return _mm512_srai_epi32(_mm512_sub_epi32(number, low), 8);
      };
      digits[1] = rest(whole);
      digits[0] = rest(digits[1]);
      above = _mm512_add_epi32(above, digits[1]);
    }
    for (int d = 0; d < D; d++) {
      alignas(16) int32_t words[4];
      _mm_store_si128((__m128i*)words, _mm512_cvtepi32_epi8(digits[d]));
      for (int64_t w = 0; w < 4; w++)
        rows.digits[(((g * vectors + i) * 4 + w) * rows.width + t) * D + d] = words[w];
    }
  }
  const float known = finite ? scale : __builtin_nanf("");
  rows.scales[at] = known;
  const int32_t of_all = _mm512_reduce_add_epi32(all);
  const int32_t of_above = D == 3 ? _mm512_reduce_add_epi32(above) : 0;
  rows.starts[2 * at] = -rows.offset * of_above;
  rows.starts[2 * at + 1] = -rows.offset * (of_all - 256 * of_above);
  if (rows.sums) rows.sums[at] = known * float(of_all);
}

template <int D>
inline void rows_to_digits(const DigitRows& rows) {
  const int64_t groups = rows.inputs / rows.group;
  if (rows.count < rows.width) {
    std::fill_n(rows.digits, rows.inputs / kInWord * rows.width * D, 0);
    std::fill_n(rows.scales, groups * rows.width, 0.0f);
    std::fill_n(rows.starts, groups * rows.width * 2, 0);
    if (rows.sums) std::fill_n(rows.sums, groups * rows.width, 0.0f);
  }
  for (int64_t t = 0; t < rows.count; t++)
    for (int64_t g = 0; g < groups; g++)
      group_to_digits<D>(rows, rows.x + rows.chosen[t] * rows.inputs, g, t);
}

inline void make_digits(const DigitRows& rows, int64_t digits) {
  if (digits == 1) rows_to_digits<1>(rows);
  else rows_to_digits<3>(rows);
}

}  // namespace
