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

using kvq::kTokenBlock;

constexpr int64_t kBlocksTogether = 32;  // blocks of rows that a group of codes meets

// Partial sums of a group, so that additions do not wait for each other. Tiles of AVX2 have enough
// sums with one each.
constexpr int kChains = kLanes == 8 ? 1 : 2;

// Codes of 4 bits that count from a centre.
struct Counted {
#if defined(__AVX512F__)
  static constexpr bool kFromZero = false;
  const Floats levels;
  explicit Counted(const PackedMatrix& weights)
      : levels(Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - weights.centre) {}
  // The look-up sees the lowest 4 bits alone.
  KVQ_INLINE Floats decoded(Uints word) const {
    return (Floats)_mm512_permutexvar_ps((__m512i)word, (__m512)levels);
  }
#else
  static constexpr bool kFromZero = true;  // sums start with the centre's part
  explicit Counted(const PackedMatrix&) {}
  KVQ_INLINE Floats decoded(Uints word) const { return to_float(word & 15); }
#endif
};

// Numbers of 4 bits, twice their size.
struct E2M1 {
  static constexpr bool kFromZero = false;
  const Table levels{kTwiceE2M1};
  explicit E2M1(const PackedMatrix&) {}
  KVQ_INLINE Floats decoded(Uints word) const { return levels.at(word); }
};

// Codes of levels.
struct Levels {
  static constexpr bool kFromZero = false;
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

  static constexpr int64_t kApart = 4;  // inputs from one run of 8 to the next
  static constexpr int64_t input_of(int64_t i) { return i % 2 * 16 + i / 2; }  // of the first run

  // Call use(i, input, codes) for each input of a group, in runs of 8.
  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint32_t* words =
        static_cast<const uint32_t*>(codes) + group * (kvq::kWordInputs / 8) * kPanelOutputs;
    for (int64_t w = 0; w < kvq::kWordInputs / 8; w++, words += kPanelOutputs) {
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
        use(8 * w + j, j % 2 * 16 + 4 * w + j / 2, entries);
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

// Numbers of 8 bits.
struct E4M3 {
  static KVQ_INLINE Floats decoded(Uints word) { return from_e4m3(word); }
};

template <class Decoder>
struct Bytes {
  static constexpr int kLaneBytes = 4;
  static constexpr bool kScaled = true, kFromZero = false;
  explicit Bytes(const PackedMatrix&) {}
  static constexpr int64_t kApart = 8;
  static constexpr int64_t input_of(int64_t i) { return i; }

  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint32_t* words =
        static_cast<const uint32_t*>(codes) + group * kGroup / 4 * kPanelOutputs;
    for (int64_t i = 0; i < kGroup; i += 4, words += kPanelOutputs) {
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
        use(i + j, i + j, entries);
      }
    }
  }
};

// Numbers of 16 bits, which need no scale.
template <bool kBfloat16>
struct Halves {
  static constexpr int kLaneBytes = 2;
  static constexpr bool kScaled = false, kFromZero = false;
  explicit Halves(const PackedMatrix&) {}
  static constexpr int64_t kApart = 8;
  static constexpr int64_t input_of(int64_t i) { return i; }

  template <int kGroup, int V, class Use>
  KVQ_INLINE void for_group(const void* codes, int64_t group, Use use) const {
    const uint16_t* numbers = static_cast<const uint16_t*>(codes) + group * kGroup * kPanelOutputs;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kGroup; i++, numbers += kPanelOutputs) {
      Floats entries[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) entries[v] = load_halves(numbers + v * kLanes, kBfloat16);
      __builtin_prefetch(numbers + kAhead / 2);
      use(i, i, entries);
    }
  }
};

// The scales and minima of group g of V vectors of outputs, from `lane` of a panel on.
template <class Codes, int kGroup, int V>
struct Affine {
  Floats scale[V]{}, least[V]{};

  KVQ_INLINE Affine(const PackedMatrix& weights, int64_t panel, int64_t lane, int64_t g) {
    if constexpr (!Codes::kScaled) return;
    const int64_t groups = weights.inputs / kGroup;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const int64_t at = lane + v * kLanes;
      scale[v] = scales_at(weights.scales, panel, groups, g, kGroup, at);
      if (weights.mins.fine)
        least[v] = minima_at(weights.mins, panel, groups, g, kGroup, at, scale[v]);
    }
  }
};

// Add group g of inputs to total[t, v], for T rows of a block of S. for_group calls
// use(i, input, entries) in the order of `Codes`.
template <class Codes, int kGroup, int T, int S, int V, class ForGroup>
KVQ_INLINE void add_group(const PackedMatrix& weights, const Affine<Codes, kGroup, V>& affine,
                          int64_t g, const TokenBlock& block, int64_t first, ForGroup for_group,
                          Floats (*total)[V]) {
  const float* const sums = block.sums + g * S + first;
  Floats part[kChains][T][V] = {};
  if (Codes::kFromZero && weights.centre != 0)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) part[0][t][v] = splat(-weights.centre * sums[t]);
  const float* const x = block.x + g * kGroup * S + first;
  for_group([&](int64_t i, int64_t input, const Floats* entries) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Floats value = splat(x[input * S + t]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) part[i % kChains][t][v] += value * entries[v];
    }
  });
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      Floats sum = part[0][t][v];
      if (kChains > 1) sum += part[kChains - 1][t][v];
      total[t][v] += Codes::kScaled ? affine.scale[v] * sum : sum;
    }
  if (Codes::kScaled && weights.mins.fine)
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) total[t][v] += affine.least[v] * splat(sums[t]);
}

template <int T, int V>
KVQ_INLINE void put_tile(const PanelProduct& product, int64_t panel, int64_t lane,
                         const TokenBlock& block, int64_t first, const Floats (*total)[V]) {
  for (int t = 0; t < T && first + t < block.count; t++)
    for (int v = 0; v < V; v++)
      put_outputs(product, block.rows[first + t], panel * kPanelOutputs + lane + v * kLanes,
                  total[t][v]);
}

// y[t, lane ..] for T rows of a block of S, and V vectors of outputs from `lane` of a panel on.
template <class Codes, int kGroup, int T, int S, int V>
KVQ_INLINE void multiply_lanes(const PanelProduct& product, int64_t panel, int64_t lane,
                               const TokenBlock& block, int64_t first) {
  const PackedMatrix& weights = *product.weights;
  const Codes decoder(weights);
  const int64_t per_input = kPanelOutputs * weights.bits / 8;  // bytes of a panel
  const char* codes = static_cast<const char*>(weights.codes) + panel * weights.inputs * per_input +
                      lane * Codes::kLaneBytes;
  Floats total[T][V] = {};
  for (int64_t g = 0; g < weights.inputs / kGroup; g++)
    add_group<Codes, kGroup, T, S, V>(
        weights, {weights, panel, lane, g}, g, block, first,
        [&](auto use) __attribute__((always_inline)) {
          decoder.template for_group<kGroup, V>(codes, g, use);
        },
        total);
  put_tile<T, V>(product, panel, lane, block, first, total);
}

template <class Codes, int kGroup, int T, int S, int V>
inline void multiply_block(const PanelProduct& product, int64_t panel, const TokenBlock& block) {
  for (int64_t first = 0; first < std::min<int64_t>(S, block.count); first += T)
    for (int64_t lane = 0; lane < kPanelOutputs; lane += V * kLanes)
      multiply_lanes<Codes, kGroup, T, S, V>(product, panel, lane, block, first);
}

// The same as multiply_lanes for several blocks of kTokenBlock rows. The codes of a group become
// floats once, and are multiplied with one block after the other.
template <class Codes, int kGroup, int T, int V>
KVQ_INLINE void multiply_blocks(const PanelProduct& product, int64_t panel, int64_t lane,
                                const TokenBlock* blocks, int64_t count) {
  constexpr int S = kTokenBlock;
  const PackedMatrix& weights = *product.weights;
  const Codes decoder(weights);
  const int64_t per_input = kPanelOutputs * weights.bits / 8;
  const char* codes = static_cast<const char*>(weights.codes) + panel * weights.inputs * per_input +
                      lane * Codes::kLaneBytes;
  Floats total[kBlocksTogether * S][V], decoded[kGroup][V];
  for (int64_t t = 0; t < count * S; t++)
    for (int v = 0; v < V; v++) total[t][v] = Floats{};
  for (int64_t g = 0; g < weights.inputs / kGroup; g++) {
    decoder.template for_group<kGroup, V>(
        codes, g, [&](int64_t i, int64_t, const Floats* entries) __attribute__((always_inline)) {
          for (int v = 0; v < V; v++) decoded[i][v] = entries[v];
        });
    const Affine<Codes, kGroup, V> affine(weights, panel, lane, g);
    for (int64_t b = 0; b < count; b++)
      for (int64_t first = 0; first < std::min<int64_t>(S, blocks[b].count); first += T)
        add_group<Codes, kGroup, T, S, V>(
            weights, affine, g, blocks[b], first,
            [&](auto use) __attribute__((always_inline)) {
              for (int64_t run = 0; run < kGroup / 8; run++)
#pragma GCC unroll 8
                for (int64_t i = 0; i < 8; i++)
                  use(8 * run + i, Codes::kApart * run + Codes::input_of(i), decoded[8 * run + i]);
            },
            total + b * S + first);
  }
  for (int64_t b = 0; b < count; b++)
    put_tile<S, V>(product, panel, lane, blocks[b], 0, total + b * S);
}

template <class Codes, int kGroup>
inline void multiply_many(const PanelProduct& product) {
  constexpr int V = kLanes == 8 ? 2 : 1;
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b += kBlocksTogether)
      for (int64_t lane = 0; lane < kPanelOutputs; lane += V * kLanes)
        multiply_blocks<Codes, kGroup, 4, V>(product, panel, lane, product.blocks + b,
                                             std::min(kBlocksTogether, product.last_block - b));
}

// Tiles that fit the registers: 32 of AVX-512, 16 of the others.
template <class Codes, int kGroup>
inline void multiply_codes(const PanelProduct& product) {
  constexpr bool kWide = kLanes == 16;
  constexpr int kAll = kWide ? 2 : 4;
  if constexpr (!kWide) {
    if (product.last_block - product.first_block > 1) return multiply_many<Codes, kGroup>(product);
  }
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b++) {
      const TokenBlock& block = product.blocks[b];
      switch (block.width) {
        case 1:
          multiply_block<Codes, kGroup, 1, 1, kAll>(product, panel, block);
          break;
        case 2:
          multiply_block<Codes, kGroup, 2, 2, kChains == 1 ? 4 : 2>(product, panel, block);
          break;
        case 4:
          multiply_block<Codes, kGroup, 4, 4, kWide || kChains == 1 ? 2 : 1>(product, panel, block);
          break;
        default:
          multiply_block<Codes, kGroup, kWide || kChains == 1 ? 8 : 4, 8, 1>(product, panel, block);
      }
    }
}

// Products with numbers that are not integers.
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
