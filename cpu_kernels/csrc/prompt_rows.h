// Exact attention of a block of query rows, for the processor that the translation unit is compiled
// for.
//
//   s[r, t] = q[r] . k[t] scale        w[r, t] = 2^(s[r, t] log2(e) - m[r])
//   l[r] = sum_t w[r, t]               o[r] = sum_t w[r, t] v[t]
//
// Keys are read in blocks of kKeyBlock, transposed into panels, so that a product of kRowTile query
// rows with a panel stays in registers. All heads of a group are rows of the same products. As long
// as keys and values are finite, a row's result does not depend on the rows beside it.
#pragma once

#include "exact.h"
#include "prompt.h"
#include "soft_cap.h"

namespace {

using kvq::kKeyBlock;
using kvq::kRowTile;
using kvq::PromptRows;

constexpr int kColumns = kLanes == 16 ? 4 : 2;  // vectors of a tile's columns
constexpr int64_t kPanel = kColumns * kLanes;   // keys of a panel
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2^x for x <= 0, to 2 units in the last place, and 0 below -126. The polynomial is Cephes' exp2f.
inline Floats exp2_of(Floats x) {
  const Ints vanishes = x <= -126.0f;  // NaN does not
  x = larger(splat(-126.0f), x);
  const Floats n = (x + kRounding) - kRounding, r = x - n;
  Floats p = splat(1.535336188e-4f);
  p = p * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472029e-1f;
  p = p * r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)(~vanishes & (Ints)(p * (Floats)power));
}

// c[r] (* shrink[r]) + a[r] . b for kRowTile rows and V vectors of columns. Without `shrink`, c is
// only written.
template <int V>
KVQ_INLINE void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                              float* c, int64_t c_stride, int64_t depth, const float* shrink) {
  Floats sums[kRowTile][V];
#pragma GCC unroll 8
  for (int r = 0; r < kRowTile; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
      sums[r][v] = shrink ? load(c + r * c_stride + v * kLanes) * shrink[r] : Floats{};
  for (int64_t d = 0; d < depth; d++, b += b_stride) {
    Floats columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRowTile; r++) {
      const Floats x = splat(a[r * a_stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] += x * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRowTile; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

// The same for up to kColumns vectors of columns.
inline void multiply_columns(int64_t vectors, const float* a, int64_t a_stride, const float* b,
                             int64_t b_stride, float* c, int64_t c_stride, int64_t depth,
                             const float* shrink) {
  constexpr int kThree = kColumns < 3 ? 1 : 3;  // no further kernel where there are never three
  switch (vectors) {
    case 1:
      return multiply_tile<1>(a, a_stride, b, b_stride, c, c_stride, depth, shrink);
    case 2:
      return multiply_tile<2>(a, a_stride, b, b_stride, c, c_stride, depth, shrink);
    case 3:
      return multiply_tile<kThree>(a, a_stride, b, b_stride, c, c_stride, depth, shrink);
    default:
      return multiply_tile<kColumns>(a, a_stride, b, b_stride, c, c_stride, depth, shrink);
  }
}

struct PromptAttention {
  const PromptRows& part;
  const int64_t rows, tiled, width;
  float *q, *o, *m, *l, *keys, *values, *scores;

  explicit PromptAttention(const PromptRows& described)
      : part(described), rows((described.last - described.first) * described.group),
        tiled(kvq::whole_tiles(rows)), width(kvq::padded_channels(described.channels)) {
    float* next = part.scratch;
    const auto take = [&next](int64_t floats) {
      float* const taken = next;
      next += (floats + 15) / 16 * 16;
      return taken;
    };
    q = take(tiled * width), o = take(tiled * width), m = take(tiled), l = take(tiled);
    keys = take(kKeyBlock * width), values = take(kKeyBlock * width);
    scores = take(kRowTile * kKeyBlock);
  }

  void run() {
    load_queries();
    const int64_t left = part.left[part.first], begin = part.begins[part.first];
    for (int64_t at = left / kKeyBlock * kKeyBlock; at < part.seen_count; at += kKeyBlock) {
      const int64_t count = minimum(kKeyBlock, part.seen_count - at);
      load_block(count, [&](int64_t i) { return int64_t(part.seen[at + i]); });
      add_block([&](int64_t row) { return part.left[token_of(row)] - at; },
                [&](int64_t) { return count; });
    }
    const int64_t count = part.counts[part.last - 1];
    for (int64_t at = begin / kKeyBlock * kKeyBlock; at < count; at += kKeyBlock) {
      load_block(minimum(kKeyBlock, count - at), [&](int64_t i) { return part.old + at + i; });
      add_block([&](int64_t row) { return part.begins[token_of(row)] - at; },
                [&](int64_t row) { return minimum(kKeyBlock, part.counts[token_of(row)] - at); });
    }
    store_results();
  }

  int64_t token_of(int64_t row) const {
    return minimum(part.first + row / part.group, part.last - 1);
  }

  void load_queries() {
    const float scale = part.scale * kLog2E;
    for (int64_t r = 0; r < tiled; r++) {
      const float* from = part.q + (r % part.group * part.queries + token_of(r)) * part.channels;
      for (int64_t c = 0; c < width; c++)
        q[r * width + c] = c < part.channels ? from[c] * scale : 0;
      m[r] = kvq::kNegInf, l[r] = 0;
    }
    std::memset(o, 0, sizeof(float) * size_t(tiled * width));
  }

  // Load `count` keys, transposed into panels [count / kPanel, width, kPanel], and values. The last
  // panel is filled up with zeros.
  template <class RowAt>
  void load_block(int64_t count, RowAt row_at) {
    with_type(part.type, [&](auto kind) {
      alignas(64) float row[kLanes];
      for (int64_t i = 0; i < count; i++) {
        const char* const key = row_of(part.keys, row_at(i));
        const char* const value = row_of(part.values, row_at(i));
        float* const column = keys + i / kPanel * kPanel * width + i % kPanel;
        for (int64_t c = 0; c < width; c += kLanes) {
          store(row, load_channels(kind, key, c));
          for (int64_t j = 0; j < kLanes; j++) column[(c + j) * kPanel] = row[j];
          store(values + i * width + c, load_channels(kind, value, c));
        }
      }
      for (int64_t i = count; i % kPanel; i++)
        for (int64_t c = 0; c < width; c++)
          keys[i / kPanel * kPanel * width + c * kPanel + i % kPanel] = 0;
    });
  }

  const char* row_of(const void* rows_of_side, int64_t index) const {
    const int64_t bytes = part.type == kvq::kFloat32 ? 4 : 2;
    return static_cast<const char*>(rows_of_side) + index * part.channels * bytes;
  }

  template <class Type>
  Floats load_channels(Type, const void* row, int64_t at) const {
    if (at + kLanes <= part.channels) return Type::load_at(row, at);
    alignas(64) char some[4 * kLanes] = {};
    const int64_t bytes = part.type == kvq::kFloat32 ? 4 : 2;
    if (at < part.channels)
      std::memcpy(some, static_cast<const char*>(row) + at * bytes,
                  size_t((part.channels - at) * bytes));
    return Type::load_at(some, 0);
  }

  // Add the loaded block. Of its keys, a row sees begin(row) .. end(row) - 1, counted in the block.
  template <class Begin, class End>
  void add_block(Begin begin, End end) {
    for (int64_t first = 0; first < tiled; first += kRowTile) {
      // Neither decreases from one token to the next.
      const int64_t low = maximum(0, begin(first)) / kPanel * kPanel,
                    high = end(first + kRowTile - 1);
      if (high <= low) continue;
      for (int64_t at = low; at < high; at += kPanel)
        multiply_columns(minimum(kColumns, (high - at + kLanes - 1) / kLanes), q + first * width,
                         width, keys + at * width, kPanel, scores + at, kKeyBlock, width, nullptr);
      float shrink[kRowTile];
      for (int64_t r = 0; r < kRowTile; r++)
        shrink[r] =
            weigh_row(scores + r * kKeyBlock + low, begin(first + r) - low,
                      maximum(0, end(first + r) - low), high - low, m[first + r], l[first + r]);
      for (int64_t c = 0; c < width; c += kPanel)
        multiply_columns(minimum(kColumns, (width - c) / kLanes), scores + low, kKeyBlock,
                         values + low * width + c, width, o + first * width + c, width, high - low,
                         shrink);
    }
  }

  // Turn the scores of a row into weights, 0 before `begin` and from `end` to `high`. Returns what
  // the sums of earlier blocks are multiplied by.
  float weigh_row(float* scores, int64_t begin, int64_t end, int64_t high, float& m,
                  float& l) const {
    const int64_t whole = whole_vectors(high);
    if (part.soft_cap > 0) cap_scores(scores, 0, whole, part.soft_cap * kLog2E);
    for (int64_t t = 0; t < minimum(begin, whole); t++) scores[t] = kvq::kNegInf;
    for (int64_t t = end; t < whole; t++) scores[t] = kvq::kNegInf;
    Floats top = splat(kvq::kNegInf);
    for (int64_t t = 0; t < end; t += kLanes) top = larger(load(scores + t), top);  // ignores NaN
    const float block = largest_lane(top), largest = block > m ? block : m;
    Floats sum = {};
    if (largest == kvq::kNegInf) {  // nothing seen yet, or only NaN and -inf
      for (int64_t t = 0; t < whole; t += kLanes) {
        const Floats weights = only_nan(load(scores + t));
        store(scores + t, weights);
        sum += weights;
      }
      l += sum_of_lanes(sum);
      return 1;
    }
    for (int64_t t = 0; t < whole; t += kLanes) {
      const Floats weights = exp2_of(load(scores + t) - largest);
      store(scores + t, weights);
      sum += weights;
    }
    const float shrink = exp2_of(splat(m - largest))[0];
    m = largest, l = l * shrink + sum_of_lanes(sum);
    return shrink;
  }

  void store_results() const {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = r % part.group * part.queries + part.first + r / part.group;
      part.m[at] = l[r] > 0 || l[r] != l[r] ? m[r] * kLn2 : kvq::kNegInf;
      part.l[at] = l[r];
      std::memcpy(part.o + at * part.channels, o + r * width,
                  sizeof(float) * size_t(part.channels));
    }
  }
};

inline void attend_rows(const PromptRows& part) { PromptAttention(part).run(); }

}  // namespace
