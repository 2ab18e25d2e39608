// Products of packed weights with rows of activations, for the processor that the translation unit
// is compiled for.
//
// Codes become floats in registers and meet a tile of tokens there. Scales and minima are applied
// once for each group of inputs, to sums. Inputs are added in the same order whatever the tile, so
// a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "vectors.h"
#include "weights.h"
#include "weights_scales.h"
#include "weights_tables.h"

namespace {

constexpr int kChains = 2;  // sums of a group, for the latency of additions

// Codes of 4 bits that count from a centre.
struct Counted {
#if defined(__AVX512F__)
  const Floats levels;
  explicit Counted(const PackedMatrix& weights)
      : levels(Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - weights.centre) {}
  // The look-up sees the lowest 4 bits alone.
  KVQ_INLINE Floats decoded(Uints word) const {
    return (Floats)_mm512_permutexvar_ps((__m512i)word, (__m512)levels);
  }
#else
  const float centre;
  explicit Counted(const PackedMatrix& weights) : centre(weights.centre) {}
  KVQ_INLINE Floats decoded(Uints word) const { return to_float(word & 15) - centre; }
#endif
};

// Numbers of 4 bits, twice their size.
struct E2M1 {
  const Table levels{kTwiceE2M1};
  explicit E2M1(const PackedMatrix&) {}
  KVQ_INLINE Floats decoded(Uints word) const { return levels.at(word); }
};

// Codes of levels.
struct Levels {
  const Table levels;
  explicit Levels(const PackedMatrix& weights) : levels(weights.levels) {}
  KVQ_INLINE Floats decoded(Uints word) const { return levels.at(word); }
};

// Codes of 4 bits.
template <class Decoder>
struct Nibbles : Decoder {
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = true;
  using Decoder::Decoder;

  // Call use(input, chain, codes) for each input of a group.
  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint32_t* words =
        static_cast<const uint32_t*>(codes) + group * (kvq::kWordInputs / 8) * kPanelOutputs;
    for (int w = 0; w < kvq::kWordInputs / 8; w++, words += kPanelOutputs) {
      Uints packed[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) std::memcpy(&packed[v], words + v * kLanes, sizeof packed[v]);
      __builtin_prefetch(words + kAhead / 4);
      __builtin_prefetch(words + kAhead / 4 + 16);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        Floats entries[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) entries[v] = this->decoded(packed[v] >> (4 * j));
        use(j % 2 * 16 + 4 * w + j / 2, j % kChains, entries);
      }
    }
  }
};

// Codes of 8 bits in the highest byte of a word.
struct Integers {
  static KVQ_INLINE Floats decoded(Uints word) {
    return __builtin_convertvector((Ints)word >> 24, Floats);
  }
};

// Numbers of 8 bits (E4M3), which no NaN is among: 2^(e - 7) (1 + m / 8), or m 2^-9 if e is 0.
struct E4M3 {
  static KVQ_INLINE Floats decoded(Uints word) {
    const Uints size = (word >> 24) & 127;
    const Floats normal = (Floats)((size << 20) + (120u << 23));
    const Floats subnormal = to_float(size) * (1.0f / 512);
    const Floats magnitude = choose((Ints)(size < 8), subnormal, normal);
    return (Floats)((Uints)magnitude | (word & 0x80000000u));
  }
};

template <class Decoder>
struct Bytes {
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = true;
  explicit Bytes(const PackedMatrix&) {}

  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint32_t* words =
        static_cast<const uint32_t*>(codes) + group * kGroup / 4 * kPanelOutputs;
    for (int i = 0; i < kGroup; i += 4, words += kPanelOutputs) {
      Uints packed[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) std::memcpy(&packed[v], words + v * kLanes, sizeof packed[v]);
      __builtin_prefetch(words + kAhead / 4);
      __builtin_prefetch(words + kAhead / 4 + 16);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        Floats entries[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) entries[v] = Decoder::decoded(packed[v] << (24 - 8 * j));
        use(i + j, j % kChains, entries);
      }
    }
  }
};

// Numbers of 16 bits, which need no scale.
template <bool kBfloat16>
struct Halves {
  static constexpr int kLaneBytes = 2;
  static constexpr bool kScaled = false;
  explicit Halves(const PackedMatrix&) {}

  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint16_t* numbers = static_cast<const uint16_t*>(codes) + group * kGroup * kPanelOutputs;
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i++, numbers += kPanelOutputs) {
      Floats entries[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) entries[v] = load_halves(numbers + v * kLanes, kBfloat16);
      __builtin_prefetch(numbers + kAhead / 2);
      use(i, i % kChains, entries);
    }
  }
};

// y[t, lane ..] for T rows of a block of S, and V vectors of outputs from `lane` of a panel on.
template <class Codes, int kGroup, int T, int S, int V>
KVQ_INLINE void multiply_lanes(const PanelProduct& product, int64_t panel, int64_t lane,
                               const TokenBlock& block, int64_t first) {
  const PackedMatrix& weights = *product.weights;
  const int64_t groups = weights.inputs / kGroup;
  const Codes decoder(weights);
  const int64_t per_input = kPanelOutputs * weights.bits / 8;  // bytes of a panel
  const char* codes = static_cast<const char*>(weights.codes) + panel * weights.inputs * per_input +
                      lane * Codes::kLaneBytes;
  Floats total[T][V] = {};
  for (int64_t g = 0; g < groups; g++) {
    Floats part[kChains][T][V] = {};
    const float* x = block.x + g * kGroup * S + first;
    decoder.template for_group<kGroup, V>(
        codes, g, [&](int input, int chain, const Floats* entries) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int t = 0; t < T; t++) {
            const Floats value = splat(x[input * S + t]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) part[chain][t][v] += value * entries[v];
          }
        });
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const int64_t at = lane + v * kLanes;
      if constexpr (!Codes::kScaled) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) total[t][v] += part[0][t][v] + part[1][t][v];
        continue;
      }
      const Floats scale = scales_at(weights.scales, panel, groups, g, kGroup, at);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) total[t][v] += scale * (part[0][t][v] + part[1][t][v]);
      if (!weights.mins.fine) continue;
      const Floats least = minima_at(weights.mins, panel, groups, g, kGroup, at, scale);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) total[t][v] += least * splat(block.sums[g * S + first + t]);
    }
  }
  for (int t = 0; t < T && first + t < block.count; t++)
    for (int v = 0; v < V; v++)
      put_outputs(product, block.rows[first + t], panel * kPanelOutputs + lane + v * kLanes,
                  total[t][v]);
}

template <class Codes, int kGroup, int T, int S, int V>
inline void multiply_block(const PanelProduct& product, int64_t panel, const TokenBlock& block) {
  for (int64_t first = 0; first < std::min<int64_t>(S, block.count); first += T)
    for (int64_t lane = 0; lane < kPanelOutputs; lane += V * kLanes)
      multiply_lanes<Codes, kGroup, T, S, V>(product, panel, lane, block, first);
}

// Tiles that fit the registers: 32 of AVX-512, 16 of the others.
template <class Codes, int kGroup>
inline void multiply_codes(const PanelProduct& product) {
  constexpr bool kWide = kLanes == 16;
  constexpr int kAll = kWide ? 2 : 4;
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b++) {
      const TokenBlock& block = product.blocks[b];
      switch (block.width) {
        case 1:
          multiply_block<Codes, kGroup, 1, 1, kAll>(product, panel, block);
          break;
        case 2:
          multiply_block<Codes, kGroup, 2, 2, 2>(product, panel, block);
          break;
        case 4:
          multiply_block<Codes, kGroup, 4, 4, kWide ? 2 : 1>(product, panel, block);
          break;
        default:
          multiply_block<Codes, kGroup, kWide ? 8 : 4, 8, 1>(product, panel, block);
      }
    }
}

// Products with numbers that are no integers.
inline void multiply_numbers(const PanelProduct& product) {
  if (product.weights->has_tables()) multiply_tables(product);
  else if (product.weights->levels) multiply_codes<Nibbles<Levels>, 32>(product);
  else if (product.weights->e4m3) multiply_codes<Bytes<E4M3>, 32>(product);
  else if (product.weights->bfloat16) multiply_codes<Halves<true>, 32>(product);
  else multiply_codes<Halves<false>, 32>(product);
}

inline void multiply_by_floats(const PanelProduct& product) {
  const PackedMatrix& weights = *product.weights;
  if (!weights.integers()) multiply_numbers(product);
  else if (weights.e2m1()) multiply_codes<Nibbles<E2M1>, 32>(product);
  else if (weights.bits == 4) multiply_codes<Nibbles<Counted>, 32>(product);
  else if (weights.group == 32) multiply_codes<Bytes<Integers>, 32>(product);
  else multiply_codes<Bytes<Integers>, 16>(product);
}

}  // namespace
