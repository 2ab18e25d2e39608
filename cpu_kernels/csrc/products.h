// The two products of attention, of packed numbers in registers with up to kRowBlock query rows:
//
//   scores[r, t] = q[r] . x[t]      sums[r] += sum_t weights[r, t] x[t]
#pragma once

#include "codes.h"

namespace {

using kvq::kRowBlock;

constexpr int64_t kPadded = kTile + 16;  // floats from one row of scores or weights to the next
constexpr int64_t kAhead = kTile;        // how many tokens ahead words are prefetched

// How numbers are scaled as they are made.
enum class Scaling {
  kNone,      // not here: the scale is applied to the query, the weight or the sum
  kTokens,    // [groups of channels, kTile], groups of whole vectors, and zero points likewise
  kElements,  // [kTile, padded]: one scale for each number
};

// Scales of numbers as they are made, and what is added to them (kTokens), or to the sums of lanes
// [rows, kLanes] (kNone).
struct ScaleAndZero {
  const float* scale;
  const float* zero;
};

template <int N>
struct Number {
  static constexpr int value = N;
};

template <class Function>
inline void for_rows(int64_t rows, Function function) {
  switch (rows) {
    case 1:
      return function(Number<1>{});
    case 2:
      return function(Number<2>{});
    case 3:
      return function(Number<3>{});
    default:
      return function(Number<4>{});
  }
}

// The keys or values of one KV head.
struct Packed {
  const Body& body;
  const Arrays& arrays;
  Bundle* bundles;           // [slots, vectors of channels], and after them the count of each slot
  int span_bits, rows_bits;  // of a span's tokens, and of a slot's rows in it: powers of two

  Packed(const Body& described, const Arrays& stored)
      : body(described), arrays(stored), bundles(nullptr),
        span_bits(__builtin_ctzll(described.span)),
        rows_bits(__builtin_ctzll(described.span / described.slots)) {}

  Bundle* bundles_of(int64_t slot) const { return bundles + slot * vectors_of(body); }
  int32_t& count_of(int64_t slot) const {
    return reinterpret_cast<int32_t*>(bundles_of(body.slots))[slot];
  }

  void find_bundles(float* scratch) {
    bundles = reinterpret_cast<Bundle*>(scratch);
    if (!body.bits) return;
    for (int64_t slot = 0; slot < body.slots; slot++)
      count_of(slot) = int32_t(bundle(body, slot, bundles_of(slot)));
  }

  // True if the bundles of all slots hold the same vectors in the same places.
  static bool alike(const Body& body) {
    return body.slots == 1 || body.chunks % (body.row_words(0) / body.width) == 0;
  }

  // The run from token number `at` of the tile that begins at token `start`, up to number `to` at
  // most.
  TokenRun run_from(int64_t start, int64_t at, int64_t to) const {
    if (body.slots == 1) return {at, start + at, 0, to - at};
    const int64_t first = start + at, rows = int64_t(1) << rows_bits,
                  within = first & (body.span - 1), row = within & (rows - 1);
    return {at, (first >> span_bits << rows_bits) + row, within >> rows_bits,
            rows - row < to - at ? rows - row : to - at};
  }

  template <class Function>
  void with_codes(Function function) const {
    if (body.table)
      body.sets() == 2 ? function(Codes<true, true>(body, arrays))
                       : function(Codes<true, false>(body, arrays));
    else
      body.sets() == 2 ? function(Codes<false, true>(body, arrays))
                       : function(Codes<false, false>(body, arrays));
  }
};

// Words of a run of tokens. Token number i is i * `apart` words further.
struct Rows {
  const uint16_t* words[2];
  int64_t apart[2];

  Rows(const Packed& packed, int64_t row) {
    for (int set = 0; set < 2; set++) {
      apart[set] = set < packed.body.sets() ? packed.body.row_words(set) : 0;
      words[set] =
          set < packed.body.sets() ? packed.arrays.words[set] + row * apart[set] : words[0];
    }
  }

  Uints load(int set, int64_t i, int32_t place) const {
    return load_words(words[set] + i * apart[set] + place);
  }
  // Prefetch the first cache line of row i, which may lie behind the end of the array.
  void ask_for(int set, int64_t i) const { __builtin_prefetch(words[set] + i * apart[set]); }
};

// scores[r, i] = the sum of the lanes of sums[r, i], for R rows and T tokens.
template <int R, int T>
KVQ_INLINE void put_sums(const Floats* sums, float* scores) {
  float totals[(R * T + 7) / 8 * 8];
  for (int i = 0; i < R * T; i += 8) {
    Floats parts[8] = {};
    for (int j = 0; j < 8 && i + j < R * T; j++) parts[j] = sums[i + j];
    add_lanes(parts, totals + i);
  }
  for (int r = 0; r < R; r++) std::memcpy(scores + r * kPadded, totals + r * T, sizeof(float) * T);
}

// Compute the scores of T tokens of a run with R rows.
template <int R, int T, Scaling kScaling, class Numbers>
KVQ_INLINE void score_tokens(const Packed& packed, const Numbers& numbers, const Bundle* bundles,
                             const Bundle* end, const Rows& rows, const float* q,
                             const ScaleAndZero& affine, float* scores) {
  const int64_t stride = packed.body.padded();
  Floats sums[R * T] = {};
  // Offsets come first, so that sums stay small, and so do their errors.
  if (kScaling == Scaling::kNone)
    for (int i = 0; i < R * T; i++) sums[i] = load(affine.zero + i / T * kLanes);
  for (const Bundle* bundle = bundles; bundle < end; bundle++) {
    Uints low[T], high[T] = {};
    for (int i = 0; i < T; i++) low[i] = rows.load(0, i, bundle->place[0]);
    for (int i = 0; Numbers::kTwoSets && i < T; i++) high[i] = rows.load(1, i, bundle->place[1]);
    for (int j = 0; j < bundle->size; j++) {
      const auto& field = bundle->fields[j];
      const Shift low_shift = shift_by(field.shift[0]), high_shift = shift_by(field.shift[1]);
      Floats x[T];
      for (int i = 0; i < T; i++) {
        x[i] = numbers.at(low[i], high[i], low_shift, high_shift);
        if (kScaling == Scaling::kTokens)
          x[i] = x[i] * affine.scale[field.group + i] + affine.zero[field.group + i];
        if (kScaling == Scaling::kElements)
          x[i] *= load(affine.scale + i * stride + field.vector * kLanes);
      }
      for (int r = 0; r < R; r++) {
        const Floats y = load(q + r * stride + field.vector * kLanes);
        for (int i = 0; i < T; i++) sums[r * T + i] += x[i] * y;
      }
    }
  }
  put_sums<R, T>(sums, scores);
}

constexpr int kTogether = kLanes == 16 ? 4 : 2;  // tokens whose scores are summed in registers

// Compute scores[r, t] for tokens start + from .. start + to - 1 of the body. `affine` is of the
// tile's tokens, scaled by `kScaling`.
template <Scaling kScaling>
void score(const Packed& packed, int64_t rows, const float* q, int64_t start, int64_t from,
           int64_t to, const ScaleAndZero& affine, float* scores) {
  const int64_t apart = kScaling == Scaling::kElements ? packed.body.padded()
                        : kScaling == Scaling::kTokens ? 1
                                                       : 0;
  packed.with_codes([&](const auto& numbers) {
    for_rows(rows, [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (int64_t at = from; at < to;) {
        const TokenRun run = packed.run_from(start, at, to);
        const Bundle *bundles = packed.bundles_of(run.slot),
                     *end = bundles + packed.count_of(run.slot);
        const auto of_token = [&](int64_t t) {
          return ScaleAndZero{affine.scale + t * apart,
                              affine.zero + (kScaling == Scaling::kTokens ? t : 0)};
        };
        int64_t i = 0;
        if constexpr (kScaling != Scaling::kElements)
          for (; i + kTogether <= run.count; i += kTogether)
            score_tokens<R, kTogether, kScaling>(packed, numbers, bundles, end,
                                                 Rows(packed, run.row + i), q, of_token(at + i),
                                                 scores + at + i);
        for (; i < run.count; i++)
          score_tokens<R, 1, kScaling>(packed, numbers, bundles, end, Rows(packed, run.row + i), q,
                                       of_token(at + i), scores + at + i);
        at += run.count;
      }
    });
  });
}

// Weights of the tokens of a tile: [kRowBlock, kPadded], or the same for each group of channels,
// `apart` floats from one group to the next.
struct Weights {
  const float* first;
  int64_t apart;  // 0 if all channels share them
};

// Add the weighted numbers of `count` runs to sums, for F fields from number `field` on of each of
// B bundles from number `index` on. The bundles of all runs are alike. scale: of channels, to be
// multiplied with the sum, or null.
template <int R, int B, int F, bool kShared, bool kElements, class Numbers>
inline void weigh_fields(const Packed& packed, const Numbers& numbers, int64_t index, int field,
                         const TokenRun* runs, int64_t count, const Weights& weights,
                         const float* elements, const float* scale, float* sums) {
  constexpr int V = B * F;
  const int64_t stride = packed.body.padded(), ahead = kAhead / packed.body.slots;
  const Bundle* first_bundles = packed.bundles_of(runs->slot) + index;
  const float *weight[V], *element[V];
  for (int j = 0; j < V; j++) {
    const int64_t channel = first_bundles[j / F].fields[field + j % F].vector * kLanes;
    weight[j] = weights.first + (kShared ? 0 : channel / packed.body.group * weights.apart);
    element[j] = kElements ? elements + channel : nullptr;
  }
  Floats acc[R][V] = {};
  for (const TokenRun* run = runs; run < runs + count; run++) {
    const Bundle* bundle = packed.bundles_of(run->slot) + index;
    const Rows rows(packed, run->row);
    Shift low_shift[V], high_shift[V];
    for (int j = 0; j < V; j++) {
      low_shift[j] = shift_by(bundle[j / F].fields[field + j % F].shift[0]);
      high_shift[j] = shift_by(bundle[j / F].fields[field + j % F].shift[1]);
    }
    for (int64_t i = 0; i < run->count; i++) {
      rows.ask_for(0, i + ahead);
      if (Numbers::kTwoSets) rows.ask_for(1, i + ahead);
      Uints low[B], high[B] = {};
      for (int b = 0; b < B; b++) low[b] = rows.load(0, i, bundle[b].place[0]);
      for (int b = 0; Numbers::kTwoSets && b < B; b++)
        high[b] = rows.load(1, i, bundle[b].place[1]);
      for (int j = 0; j < V; j++) {
        Floats x = numbers.at(low[j / F], high[j / F], low_shift[j], high_shift[j]);
        if (kElements) x *= load(element[j] + (run->token + i) * stride);
        for (int r = 0; r < R; r++)
          acc[r][j] += x * weight[kShared ? 0 : j][r * kPadded + run->token + i];
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < V; j++) {
      const int64_t at = first_bundles[j / F].fields[field + j % F].vector * kLanes;
      float* sum = sums + r * stride + at;
      store(sum, load(sum) + (scale ? acc[r][j] * load(scale + at) : acc[r][j]));
    }
}

// sums[r] += sum_t weights[r, t] x[t] over tokens start + from .. start + to - 1, times `scale` of
// channels if there is one.
template <bool kShared, bool kElements>
void weigh(const Packed& packed, int64_t rows, const Weights& weights, int64_t start, int64_t from,
           int64_t to, const float* elements, const float* scale, float* sums) {
  TokenRun runs[kTile];
  int64_t count = 0;
  for (int64_t at = from; at < to; at += runs[count++].count)
    runs[count] = packed.run_from(start, at, to);
  const int64_t together = Packed::alike(packed.body) ? count : 1;
  packed.with_codes([&](const auto& numbers) {
    for_rows(rows, [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (const TokenRun* run = runs; run < runs + count; run += together) {
        const Bundle* bundles = packed.bundles_of(run->slot);
        const int64_t last = packed.count_of(run->slot);
        // True if so many bundles from number b on have this size.
        const auto sizes = [&](int64_t b, int64_t alike, int size) {
          for (int64_t i = 0; i < alike; i++)
            if (b + i >= last || bundles[b + i].size != size) return false;
          return true;
        };
        const auto add = [&](auto bundle_count, auto field_count, int64_t b, int field) {
          constexpr int B = decltype(bundle_count)::value, F = decltype(field_count)::value;
          weigh_fields<R, B, F, kShared, kElements>(packed, numbers, b, field, run, together,
                                                    weights, elements, scale, sums);
        };
        for (int64_t b = 0; b < last; b++) {
          const int size = bundles[b].size;
          int j = 0;
          if constexpr (!kElements) {
            if constexpr (kLanes == 16) {  // as many sums as the registers hold
              if (sizes(b, 2, 2)) {
                add(Number<2>{}, Number<2>{}, b++, 0);
                continue;
              }
              if (sizes(b, 4, 1)) {
                add(Number<4>{}, Number<1>{}, b, 0);
                b += 3;
                continue;
              }
              for (; j + 4 <= size; j += 4) add(Number<1>{}, Number<4>{}, b, j);
            } else if (sizes(b, 2, 1)) {
              add(Number<2>{}, Number<1>{}, b++, 0);
              continue;
            }
            for (; j + 2 <= size; j += 2) add(Number<1>{}, Number<2>{}, b, j);
          }
          for (; j < size; j++) add(Number<1>{}, Number<1>{}, b, j);
        }
      }
    });
  });
}

}  // namespace
