// Products of packed weights with rows of activations by instructions that multiply bytes: the
// digits, and the tiles whose products they become (weights_vnni.h, weights_pairs.h).
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

// y[t, lane ..] for T rows of a block of S, and V vectors of outputs from `lane` of a panel on.
template <Code kCode, int kGroup, int D, int T, int S, int V>
void multiply_tile(const PanelProduct& product, int64_t panel, int64_t lane,
                   const TokenBlock& block, int64_t first);

template <Code kCode, int kGroup, int D, int T, int S, int V>
inline void add_block(const PanelProduct& product, int64_t panel, const TokenBlock& block) {
  for (int64_t first = 0; first < std::min<int64_t>(S, block.count); first += T)
    for (int64_t lane = 0; lane < kPanelOutputs; lane += V * kLanes)
      multiply_tile<kCode, kGroup, D, T, S, V>(product, panel, lane, block, first);
}

// Tiles whose sums fit the registers: 32 of AVX-512, and 16 of AVX2, which has one digit alone.
template <Code kCode, int kGroup, int D>
inline void multiply_digits(const PanelProduct& product) {
  constexpr bool kWide = kLanes == 16;
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b++) {
      const TokenBlock& block = product.blocks[b];
      switch (block.width) {
        case 1:
          add_block<kCode, kGroup, D, 1, 1, kWide ? 2 : 4>(product, panel, block);
          break;
        case 2:
          add_block<kCode, kGroup, D, 2, 2, 2>(product, panel, block);
          break;
        case 4:
          add_block<kCode, kGroup, D, 4, 4, 2>(product, panel, block);
          break;
        default:
          add_block<kCode, kGroup, D, 8, 8, kWide && D == 1 ? 2 : 1>(product, panel, block);
      }
    }
}

inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#else
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#endif
}

inline int32_t sum_of_lanes(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  const __m256i eight = (__m256i)x;
  const __m128i four =
      _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#endif
}

// The lowest 8 bits of each lane.
inline void store_bytes(Ints x, int8_t* bytes) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)bytes, _mm512_cvtepi32_epi8((__m512i)x));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes lowest = __builtin_convertvector(x, Bytes);
  std::memcpy(bytes, &lowest, sizeof lowest);
#endif
}

// Digits of a group of a row. The scale of a group is NaN if any entry is not finite.
template <int D>
inline void group_to_digits(const DigitRows& rows, const float* x, int64_t g, int64_t t) {
  constexpr float kMaxCode = D == 1 ? 127.0f : 127.0f * 65536;
  constexpr int64_t kMaxVectors = 32 / kLanes;
  const int64_t vectors = rows.group / kLanes, at = g * rows.width + t;
  Floats entries[kMaxVectors], largest{};
  Ints all_finite = ~Ints{};
  for (int64_t i = 0; i < vectors; i++) {
    entries[i] = load(x + g * rows.group + i * kLanes);
    const Floats size = (Floats)((Ints)entries[i] & 0x7FFFFFFF);
    all_finite &= (Ints)(size < __builtin_inff());
    largest = larger(largest, size);
  }
  const bool finite = sum_of_lanes(all_finite) == -kLanes;
  const float max_size = finite ? largest_lane(largest) : 0;
  // Groups of tiny numbers count as 0: 1 / scale has to be a number.
  const float scale = max_size > 1e-30f ? max_size / kMaxCode : 0;
  const Floats factor = splat(scale > 0 ? kMaxCode / max_size : 0);
  Ints above{}, all{};
  for (int64_t i = 0; i < vectors; i++) {
    Ints digits[3];
    const Ints whole = finite ? nearest(entries[i] * factor) : Ints{};
    all += whole;
    digits[D - 1] = whole;
    if constexpr (D == 3) {  // the lowest 8 bits of each, and what they leave
      const auto rest = [](Ints number) { return (number - (number << 24 >> 24)) >> 8; };
      digits[1] = rest(whole);
      digits[0] = rest(digits[1]);
      above += digits[1];
    }
    for (int d = 0; d < D; d++) {
      alignas(16) int32_t words[kLanes / kInWord];
      store_bytes(digits[d], reinterpret_cast<int8_t*>(words));
      for (int64_t w = 0; w < kLanes / kInWord; w++)
        rows.digits[((g * rows.group + i * kLanes) / kInWord + w) * rows.width * D + t * D + d] =
            words[w];
    }
  }
  const float known = finite ? scale : __builtin_nanf("");
  rows.scales[at] = known;
  const int32_t of_all = sum_of_lanes(all), of_above = D == 3 ? sum_of_lanes(above) : 0;
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
