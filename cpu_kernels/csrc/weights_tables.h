// Products with codes whose levels are their output's own, and with sparse entries.
//
// The 16 levels of an output are one table in registers, and lanes are inputs: lane w of a vector
// has entry j of word w. Sparse entries are added at the end, less the level of code 0, which
// stands where they are. Inputs are added in the same order whatever the tile.
#pragma once

#include <algorithm>

#include "vectors.h"
#include "weights.h"
#include "weights_scales.h"

namespace {

constexpr int64_t kSparseStep = 4;  // entries of an output that are read together

inline float number_at(const void* numbers, int64_t at, kvq::ScaleKind kind) {
  if (kind == kvq::ScaleKind::kFloat32) return static_cast<const float*>(numbers)[at];
  return load_half(static_cast<const uint16_t*>(numbers) + at, kind == kvq::ScaleKind::kBfloat16);
}

// The levels of an output as floats.
inline void widen_levels(const kvq::Tables& tables, int64_t output, float* levels) {
  for (int64_t at = 0; at < 16; at += kLanes) {
    if (tables.kind == kvq::ScaleKind::kFloat32)
      store(levels + at, load(static_cast<const float*>(tables.levels) + output * 16 + at));
    else
      store(levels + at, load_halves(static_cast<const uint16_t*>(tables.levels) + output * 16 + at,
                                     tables.kind == kvq::ScaleKind::kBfloat16));
  }
}

// The first words of a vector, and zeros behind them.
inline Uints load_some(const uint32_t* p, int64_t count) {
#if defined(__AVX512F__)
  return (Uints)_mm512_maskz_loadu_epi32(count < kLanes ? __mmask16((1u << count) - 1) : 0xFFFF, p);
#else
  Uints words{};
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); i++) words[i] = p[i];
  return words;
#endif
}

// Add the sparse entries of an output to the sums of T rows of a block of S.
template <int T, int S>
KVQ_INLINE void add_sparse(const kvq::Tables& tables, int64_t output, float zero_level,
                           const TokenBlock& block, int64_t first, float* sums) {
  const int64_t end = tables.starts[output + 1];
  float part[T] = {};
  for (int64_t begin = tables.starts[output]; begin < end; begin += kSparseStep) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kSparseStep; i++) {
      // The last entry again, times 0, takes less than a branch that is guessed wrong.
      const int64_t e = std::min(begin + i, end - 1);
      const float more = number_at(tables.values, e, tables.kind) - zero_level;
      const float* x = block.x + int64_t(tables.inputs[e]) * S + first;
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) part[t] += (begin + i < end ? more : 0.0f) * x[t];
    }
  }
  for (int t = 0; t < T; t++) sums[t] += part[t];
}

// Add the products of a vector of words of V outputs with T rows.
template <int T, int S, int V>
KVQ_INLINE void add_words(const Uints* packed, const float (*levels)[16], const float* x,
                          Floats* sums) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    Floats entries[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) entries[v] = Table(levels[v]).at(packed[v] >> (4 * j));
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Floats value = load(x + (j * S + t) * kvq::kLaneWords);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[v * T + t] += value * entries[v];
    }
  }
}

// y[t, output ..] for T rows of a block of S, and V outputs.
template <int T, int S, int V>
KVQ_INLINE void multiply_outputs(const PanelProduct& product, int64_t output,
                                 const TokenBlock& block, int64_t first) {
  const PackedMatrix& weights = *product.weights;
  const int64_t words = weights.inputs / 8;
  const uint32_t* const codes = static_cast<const uint32_t*>(weights.codes) + output * words;
  alignas(64) float levels[V][16];
  for (int v = 0; v < V; v++) widen_levels(weights.tables, output + v, levels[v]);
  constexpr int kSums = (T * V + 7) / 8 * 8;
  Floats sums[kSums] = {};
  // The address in `by_word` of word w, which is entry w % kLaneWords of its run.
  const auto x_of = [&](int64_t w) __attribute__((always_inline)) {
    return block.by_word + first * kvq::kLaneWords + w / kvq::kLaneWords * kvq::kLaneRun * S +
           w % kvq::kLaneWords;
  };
  Uints packed[V];
  int64_t w = 0;
  for (; w + kLanes <= words; w += kLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      std::memcpy(&packed[v], codes + v * words + w, sizeof packed[v]);
      __builtin_prefetch(codes + v * words + w + kAhead / 4);
    }
    add_words<T, S, V>(packed, levels, x_of(w), sums);
  }
  if (w < words) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) packed[v] = load_some(codes + v * words + w, words - w);
    add_words<T, S, V>(packed, levels, x_of(w), sums);
  }
  float total[kSums];
  for (int i = 0; i < kSums; i += 8) add_lanes(sums + i, total + i);
  for (int v = 0; v < V; v++) {
    add_sparse<T, S>(weights.tables, output + v, levels[v][0], block, first, total + v * T);
    for (int t = 0; t < T && first + t < block.count; t++)
      product.y[block.rows[first + t] * weights.outputs + output + v] = total[v * T + t];
  }
}

template <int T, int S, int V>
inline void multiply_outputs_of(const PanelProduct& product, const TokenBlock& block, int64_t begin,
                                int64_t end) {
  for (int64_t first = 0; first < std::min<int64_t>(S, block.count); first += T) {
    int64_t output = begin;
    for (; output + V <= end; output += V) multiply_outputs<T, S, V>(product, output, block, first);
    for (; output < end; output++) multiply_outputs<T, S, 1>(product, output, block, first);
  }
}

inline void multiply_tables(const PanelProduct& product) {
  constexpr bool kWide = kLanes == 16;
  for (int64_t panel = product.first_panel; panel < product.last_panel; panel++)
    for (int64_t b = product.first_block; b < product.last_block; b++) {
      const TokenBlock& block = product.blocks[b];
      const int64_t begin = panel * kPanelOutputs;
      const int64_t end = std::min(begin + kPanelOutputs, product.weights->outputs);
      switch (block.width) {
        case 1:
          multiply_outputs_of<1, 1, kWide ? 8 : 4>(product, block, begin, end);
          break;
        case 2:
          multiply_outputs_of<2, 2, kWide ? 4 : 2>(product, block, begin, end);
          break;
        case 4:
          multiply_outputs_of<4, 4, kWide ? 4 : 2>(product, block, begin, end);
          break;
        default:
          multiply_outputs_of<4, 8, kWide ? 4 : 2>(product, block, begin, end);
      }
    }
}

}  // namespace
