// Attention over a run of body tokens, for the processor that the translation unit is compiled for.
//
//   scores   q . (code s + z)
//     = sum_c (q s)_c code_c + q . z           groups of tokens, or one scale per channel: s is
//                                              applied to the query once
//     = sum_g q_g . (code s + z)_g             groups of channels: s and z are applied to the code,
//                                              or to the sums over a group if words are transposed
//   values   p . (code s + z)
//     = (sum_t p_t code_t) s + (sum_t p_t) z   groups of tokens, or one scale per channel: s is
//                                              applied to the weighted sum
//     = sum_t (p s)_t code_t + sum_t p_t z_t   groups of channels: s is applied to the weight
//
// Online softmax over tiles of kTile tokens, all in fp32. No unpacked number is stored, except for
// bodies whose vectors are more than codes with scales and zero points (decoded.h, runs.h).
#pragma once

#include "attention_state.h"
#include "soft_cap.h"

namespace {

struct Attention : AttentionState {
  using AttentionState::AttentionState;

  // Compute the scores of the tokens from .. live - 1 of the tile that begins at token `first`. The
  // tile's other tokens get arbitrary scores.
  void score_tile(const Transposed& across, const RunsAcross& runs, int64_t first, int64_t from,
                  int64_t live) {
    if (RunsAcross::served(k)) return score_runs(runs, first, from, live);
    if (k_decoded) return score_decoded(runs, first, from, live);
    if (Transposed::served(k)) return score_transposed(across, first, from, live);
    if (k.affine == kvq::kChannelGroups) {
      load_token_scales(k, work.keys, work.capacity, first, live, token_scale, token_zero);
      if (k.whole_groups(kLanes)) {
        for (int64_t b = 0; b < blocks; b++)
          score<Scaling::kTokens>(keys, rows_of(b), q_of(b), first, from, live,
                                  {token_scale, token_zero}, scores_of(b));
        return;
      }
      spread_scales(k, live);
      for (int64_t b = 0; b < blocks; b++) {
        score<Scaling::kElements>(keys, rows_of(b), q_of(b), first, from, live, {elements, nullptr},
                                  scores_of(b));
        for (int64_t r = 0; r < rows_of(b); r++)
          for (int64_t g = 0; g < k_groups; g++)
            add_to_scores(b, r, live, query_sums[(b * kRowBlock + r) * k_groups + g],
                          token_zero + g * kTile);
      }
      return;
    }
    const bool grouped = k.affine == kvq::kTokenGroups;
    const int64_t step = grouped ? greatest_common_divisor(k.group, kTile) : kTile;
    for (int64_t at = from / step * step; at < live; at += step) {
      if (grouped) load_stored_scales(k, work.keys, (first + at) / k.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        if (grouped) scale_queries(b, scaled);
        const float* queries = grouped ? scaled : q_of(b);
        score<Scaling::kNone>(keys, rows_of(b), queries, first, maximum(at, from),
                              minimum(at + step, live), {nullptr, bias_of_block(b)}, scores_of(b));
      }
    }
  }

  // Compute the scores of whole spans.
  void score_transposed(const Transposed& across, int64_t first, int64_t from, int64_t live) {
    const bool scaled_tokens = k.affine == kvq::kChannelGroups,
               grouped = k.affine == kvq::kTokenGroups;
    if (scaled_tokens)
      load_token_scales(k, work.keys, work.capacity, first, live, token_scale, token_zero);
    const int64_t step = grouped ? greatest_common_divisor(k.group, k.span) : k.span;
    const int64_t start = from / k.span * k.span;
    for (int64_t at = start; at < live; at += step) {
      if (at % k.span == 0) across.read(first + at);
      const bool begins = at == start || (first + at) % k.group == 0;
      if (grouped && begins) load_stored_scales(k, work.keys, (first + at) / k.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        if (grouped && (begins || blocks > 1)) scale_queries(b, scaled);
        float starts[kRowBlock];
        for (int64_t r = 0; r < rows_of(b); r++)
          starts[r] = scaled_tokens ? 0 : sum_of_lanes(load(bias_of_block(b) + r * kLanes));
        const ScaleAndZero affine =
            scaled_tokens ? ScaleAndZero{token_scale + at, token_zero + at} : ScaleAndZero{};
        const float *queries = grouped ? scaled : q_of(b),
                    *sums_of_queries = query_sums + b * kRowBlock * k_groups;
        across.score(rows_of(b), queries, at % k.span, step, starts, sums_of_queries, affine,
                     scores_of(b) + at);
      }
    }
  }

  // Compute the scores of whole groups of kDecoded tokens.
  void score_runs(const RunsAcross& runs, int64_t first, int64_t from, int64_t live) {
    const Decoder decoder = this->decoder(k, work.keys, keys);
    for (int64_t at = from / kDecoded * kDecoded; at < live; at += kDecoded) {
      runs.read(first + at, 0);
      for (int64_t b = 0; b < blocks; b++) {
        decoder.turn_back(first + at, rows_of(b), q_of(b), scaled);
        key_runs().order(rows_of(b), scaled);
        runs.score(first + at, minimum(kDecoded, live - at), rows_of(b), scaled, scores_of(b) + at);
      }
    }
  }

  void weigh_runs(const RunsAcross& runs, int64_t first, int64_t live) {
    for (int64_t at = 0; at < live; at += kDecoded) runs.read(first + at, at / kDecoded);
    for (int64_t b = 0; b < blocks; b++)
      runs.weigh(first, live, rows_of(b), scores_of(b), weights, sums_of(b));
  }

  void score_decoded(const RunsAcross& across, int64_t first, int64_t from, int64_t live) {
    const Decoder decoder = this->decoder(k, work.keys, keys);
    const Runs runs = key_runs();
    for (int64_t at = from / kDecoded * kDecoded; at < live; at += kDecoded) {
      const void* rows[kDecoded];
      const int64_t count = minimum(kDecoded, live - at);
      int64_t type = kvq::kFloat32;
      if (k.synthesis) synthesize(across, runs, first + at, count, rows);
      else if (k_runs) runs.keys(first + at, count, rows);
      else type = decoder.rows(first + at, count, rows);
      for (int64_t b = 0; b < blocks; b++) {
        if (k.rotated) decoder.turn_back(first + at, rows_of(b), q_of(b), scaled);
        if (k_runs) runs.order(rows_of(b), scaled);
        const float* queries = k.rotated ? scaled : q_of(b);
        score_exact(rows_of(b), rows, type, count, vectors(), queries, k.row_floats(),
                    scores_of(b) + at);
      }
    }
  }

  void synthesize(const RunsAcross& across, const Runs& runs, int64_t first, int64_t count,
                  const void** rows) const {
    if (RunsAcross::readable(k)) {
      across.read(first, 0);
      across.put_numbers();
    } else {
      runs.read_numbers(first, count);
    }
    runs.synthesize_keys(first, count, work.keys.turns, rows);
  }

  void weigh_decoded(int64_t first, int64_t from, int64_t live) {
    const Decoder decoder = this->decoder(v, work.values, values);
    const Runs runs = value_runs();
    const int64_t read = v_runs ? runs.vectors_of_values() : vectors();
    for (int64_t at = from / kDecoded * kDecoded; at < live; at += kDecoded) {
      const void* rows[kDecoded];
      const int64_t count = minimum(kDecoded, live - at), skipped = maximum(from - at, 0);
      int64_t type = kvq::kFloat32;
      if (v_runs) runs.values(first + at, count, rows);
      else type = decoder.rows(first + at, count, rows);
      for (int64_t b = 0; b < blocks; b++)
        weigh_exact(rows_of(b), rows + skipped, type, count - skipped, read,
                    scores_of(b) + at + skipped, v.row_floats(), sums_of(b));
    }
  }

  // scores[r, 0 .. live - 1] += factor * added[t]. Both are padded to whole vectors.
  void add_to_scores(int64_t block, int64_t r, int64_t live, float factor,
                     const float* added) const {
    float* out = scores_of(block) + r * kPadded;
    for (int64_t t = 0; t < live; t += kLanes)
      store(out + t, load(out + t) + load(added + t) * factor);
  }

  // Put kNegInf into the scores of the tokens of a tile that a row does not see.
  void hide(int64_t row, int64_t first, int64_t from, int64_t live, float* out) const {
    int64_t begin = from, end = live;
    if (!work.windows) {
      const int64_t query = row % work.queries, start = first + work.offset;
      if (work.lower) begin = maximum(from, minimum(work.lower[query] - start, live));
      end = maximum(0, minimum(work.limits[query] - start, live));
    }
    for (int64_t t = 0; t < begin; t++) out[t] = kNegInf;
    for (int64_t t = end; t < whole_vectors(live); t++) out[t] = kNegInf;
  }

  // Turn the scores of a block into weights exp(score - m), or 0 for tokens that the row does not
  // see.
  void weights_of_tile(int64_t block, int64_t first, int64_t from, int64_t live) {
    const int64_t padded = whole_vectors(live);
    for (int64_t i = 0; i < rows_of(block); i++) {
      const int64_t row = block * kRowBlock + i;
      float* out = scores_of(block) + i * kPadded;
      if (work.soft_cap > 0) cap_scores(out, from / kLanes * kLanes, padded, work.soft_cap);
      hide(row, first, from, live, out);
      Floats highest = splat(largest[row]);
      for (int64_t t = 0; t < padded; t += kLanes) highest = larger(load(out + t), highest);
      const float level = largest_lane(highest);
      if (level > largest[row]) shrink(row, exp_of(splat(largest[row] - level))[0]);
      largest[row] = level;
      const bool unseen = level == kNegInf;  // no token yet, or only NaN and -inf
      Floats sum = load(total + row * kLanes);
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats score = load(out + t);
        const Floats p = unseen ? only_nan(score) : exp_of(score - level);
        store(out + t, p);
        sum += p;
      }
      store(total + row * kLanes, sum);
    }
  }

  void shrink(int64_t row, float factor) {
    store(total + row * kLanes, load(total + row * kLanes) * factor);
    float* at = sums + row * v.row_floats();
    for (int64_t c = 0; c < channels; c += kLanes) store(at + c, load(at + c) * factor);
    for (int64_t g = 0; g < v_groups; g++)
      store(zero_sum_of(row, g), load(zero_sum_of(row, g)) * factor);
  }

  // Add the weighted values of the tile's tokens from .. live - 1. The others may hold NaN.
  void weigh_tile(const RunsAcross& runs, int64_t first, int64_t from, int64_t live) {
    if (RunsAcross::served(v)) return weigh_runs(runs, first, live);
    if (v_decoded) return weigh_decoded(first, from, live);
    if (v.affine == kvq::kChannelGroups) {
      const bool whole = v.whole_groups(kLanes);
      load_token_scales(v, work.values, work.capacity, first, live, token_scale, token_zero);
      for (int64_t g = 0; g < v_groups; g++)
        for (int64_t t = 0; t < from; t++)
          token_scale[g * kTile + t] = token_zero[g * kTile + t] = 0;
      if (!whole) spread_scales(v, live);
      for (int64_t b = 0; b < blocks; b++) {
        for (int64_t g = 0; g < v_groups; g++) scale_weights(b, g, live);
        if (whole)
          weigh<false, false>(values, rows_of(b), {weights, kRowBlock * kPadded}, first, from, live,
                              nullptr, nullptr, sums_of(b));
        else
          weigh<true, true>(values, rows_of(b), {scores_of(b), 0}, first, from, live, elements,
                            nullptr, sums_of(b));
      }
      return;
    }
    const bool grouped = v.affine == kvq::kTokenGroups;
    const int64_t step = grouped ? greatest_common_divisor(v.group, kTile) : kTile;
    for (int64_t at = from / step * step; at < live; at += step) {
      const int64_t begin = maximum(at, from), end = minimum(at + step, live);
      if (grouped) load_channel_scales(v, work.values, (first + at) / v.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        weigh<true, false>(values, rows_of(b), {scores_of(b), 0}, first, begin, end, nullptr,
                           grouped ? scale : nullptr, sums_of(b));
        if (grouped) add_zeros(b, begin, end);
      }
    }
  }

  // Add the zero points of channels for the tokens from .. to - 1.
  void add_zeros(int64_t block, int64_t from, int64_t to) {
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float all = sum_of(scores_of(block) + r * kPadded, from, to);
      float* row_sums = sums_of(block) + r * v.padded();
      for (int64_t c = 0; c < v.channels; c += kLanes)
        store(row_sums + c, load(row_sums + c) + load(zero + c) * all);
    }
  }

  // Multiply the weights of a block by the scales of a group of channels, into `weights`, and add
  // up their products with its zero points.
  void scale_weights(int64_t block, int64_t group, int64_t live) {
    const float *s = token_scale + group * kTile, *z = token_zero + group * kTile;
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float* p = scores_of(block) + r * kPadded;
      float *out = weights + (group * kRowBlock + r) * kPadded,
            *zeros = zero_sum_of(block * kRowBlock + r, group);
      Floats added = load(zeros);
      for (int64_t t = 0; t < live; t += kLanes) {  // s and z are 0 from `live` on
        const Floats weight = load(p + t);
        added += weight * load(z + t);
        store(out + t, weight * load(s + t));
      }
      store(zeros, added);
    }
  }

  static float sum_of(const float* x, int64_t from, int64_t to) {
    Floats sums = {};
    int64_t t = from;
    for (; t + kLanes <= to; t += kLanes) sums += load(x + t);
    float sum = sum_of_lanes(sums);
    for (; t < to; t++) sum += x[t];
    return sum;
  }

  void finish() {
    const bool scaled_sums = v.affine == kvq::kChannels && !work.windows && !v_decoded;
    if (scaled_sums) load_channel_scales(v, work.values, 0, scale, zero);
    for (int64_t r = 0; r < work.rows; r++) {
      const float all = sum_of_lanes(load(total + r * kLanes));
      float *row_sums = sums + r * v.row_floats(), *out = work.o + r * channels;
      work.m[r] = largest[r];
      work.l[r] = all;
      if (v_runs && !work.windows) {
        value_runs().synthesize(row_sums, all, out);
        continue;
      }
      for (int64_t g = 0; g < v_groups; g++) {
        const float zeros = sum_of_lanes(load(zero_sum_of(r, g)));
        for (int64_t c = g * v.group; c < (g + 1) * v.group; c++) row_sums[c] += zeros;
      }
      for (int64_t c = 0; c < channels; c++)
        out[c] = scaled_sums ? row_sums[c] * scale[c] + zero[c] * all : row_sums[c];
    }
  }

  // Point at rows of whole vectors, in place or copied to `elements`. Return the type of their
  // numbers. Keys before RoPE are rotated by the tables of their slots.
  int64_t widen(const void* const* stored, const int64_t* slots, int64_t count, const void** rows) {
    const kvq::Windows& windows = *work.windows;
    const int64_t padded = vectors() * kLanes, half = channels / 2;
    const bool turned = slots && k.rotated;
    for (int64_t i = 0; i < count; i++) {
      rows[i] = stored[i];
      if (channels == padded && !turned) continue;
      float* copy = elements + i * padded;
      load_floats(stored[i], windows.type, 0, channels, copy);
      for (int64_t c = channels; c < padded; c++) copy[c] = 0;
      if (turned)
        turn<false>(copy, windows.turns[0] + slots[i] * half, windows.turns[1] + slots[i] * half,
                    half, copy);
      rows[i] = copy;
    }
    return channels == padded && !turned ? windows.type : int64_t(kvq::kFloat32);
  }

  // Attend to a tile of tokens of the windows.
  void add_exact(const void* const* stored_keys, const void* const* stored_values,
                 const int64_t* slots, int64_t count) {
    const void* rows[kTile];
    int64_t type = widen(stored_keys, slots, count, rows);
    for (int64_t b = 0; b < blocks; b++) {
      score_exact(rows_of(b), rows, type, count, vectors(), q_of(b), k.row_floats(), scores_of(b));
      weights_of_tile(b, 0, 0, count);
    }
    type = widen(stored_values, nullptr, count, rows);
    for (int64_t b = 0; b < blocks; b++)
      weigh_exact(rows_of(b), rows, type, count, vectors(), scores_of(b), v.row_floats(),
                  sums_of(b));
  }

  void run_windows() {
    const kvq::Windows& windows = *work.windows;
    const int64_t bytes = channels * (windows.type == kvq::kFloat32 ? 4 : 2);
    const void *stored_keys[kTile], *stored_values[kTile];
    int64_t slots[kTile], slot = 0, count = 0;
    for (int window = 0; window < 2; window++) {
      for (int64_t t = 0; t < windows.tokens[window]; t++, slot++) {
        if (!windows.seen[slot]) continue;  // tokens that are not seen may hold anything
        stored_keys[count] = static_cast<const char*>(windows.keys[window]) + t * bytes;
        stored_values[count] = static_cast<const char*>(windows.values[window]) + t * bytes;
        slots[count] = slot;
        if (++count < kTile) continue;
        add_exact(stored_keys, stored_values, slots, count);
        count = 0;
      }
    }
    if (count) add_exact(stored_keys, stored_values, slots, count);
  }

  void run_body() {
    const Transposed across(keys, transposed);
    const Runs keys_in_runs = key_runs(), values_in_runs = value_runs();
    const RunsAcross runs(keys_in_runs, across_keys), runs_of_v(values_in_runs, across_values);
    if (k_runs && !work.ordered)
      RunsAcross::served(k) ? runs.order_keys(work.keys.turns)
                            : keys_in_runs.order_keys(work.keys.turns);
    if (v_runs && !RunsAcross::served(v)) values_in_runs.clear();
    for (int64_t first = work.first / kTile * kTile; first < work.last; first += kTile) {
      const int64_t from = maximum(work.first - first, 0), live = minimum(kTile, work.last - first);
      score_tile(across, runs, first, from, live);
      for (int64_t b = 0; b < blocks; b++) weights_of_tile(b, first, from, live);
      weigh_tile(runs_of_v, first, from, live);
    }
  }

  void run() {
    start();
    if (work.windows) run_windows();
    else run_body();
    finish();
  }
};

}  // namespace
