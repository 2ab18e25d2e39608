// Attention over a run of body tokens, for the processor that the translation unit is compiled for.
//
//   scores   q . (code s + z)  =  sum_c (q s)_c code_c + q . z      groups of tokens, or one scale for each channel: s meets the query once
//                              =  sum_g q_g . (code s + z)_g        groups of channels: s and z meet the code, or,
//                                                                   where words are transposed, the sums over a group
//   values   p . (code s + z)  =  (sum_t p_t code_t) s + (sum_t p_t) z     groups of tokens, or of channels: s meets the weighted sum
//                              =  sum_t (p s)_t code_t + sum_t p_t z_t     groups of channels: s meets the weight
//
// Online softmax over tiles of kTile tokens, all in fp32. Nothing that is unpacked is stored, but for bodies whose vectors are more than that
// (decoded.h, runs.h).
#pragma once

#include "decoded.h"
#include "runs_across.h"

namespace {

using kvq::kNegInf;
using kvq::Span;

// The state of one call: everything is in the caller's scratch.
struct Attention {
  const Span& span;
  const Body &k, &v;
  Packed keys, values;
  const bool k_decoded, v_decoded, k_runs, v_runs;
  int64_t channels, blocks, k_groups, v_groups;
  float *q, *scaled, *sums, *scores, *weights, *query_sums, *zero_sums, *largest, *total, *bias;
  float *token_scale, *token_zero, *elements, *scale, *zero, *angle_scale, *angle_zero, *transposed;
  float *runs_of_keys, *runs_of_values, *across_keys, *across_values;

  explicit Attention(const Span& given)
      : span(given), k(*given.k), v(*given.v), keys(k, given.keys), values(v, given.values), k_decoded(k.decoded()), v_decoded(v.decoded()),
        k_runs(k.form == kvq::kRuns), v_runs(v.form == kvq::kRuns) {
    channels = k.head_dim();
    blocks = kvq::row_blocks(span.rows);
    k_groups = k.channel_groups(), v_groups = v.channel_groups();
    const int64_t rows = blocks * kRowBlock, widest = maximum(k.row_floats(), v.row_floats()), groups = maximum(k_groups, v_groups);
    float* next = span.scratch;
    auto take = [&next](int64_t count) {
      float* taken = next;
      next += (count + 15) / 16 * 16;
      return taken;
    };
    q = take(rows * k.row_floats());
    scaled = take(kRowBlock * k.row_floats());
    sums = take(rows * v.row_floats());
    scores = take(rows * kPadded);
    weights = take(maximum(v_groups, 1) * kRowBlock * kPadded);
    query_sums = take(rows * k_groups);
    zero_sums = take(rows * v_groups * kLanes);
    largest = take(rows), total = take(rows * kLanes), bias = take(rows * kLanes);
    token_scale = take(kTile * groups), token_zero = take(kTile * groups);
    elements = take(kTile * widest);
    scale = take(widest + kLanes), zero = take(widest + kLanes), angle_scale = take(widest + kLanes), angle_zero = take(widest + kLanes);
    keys.find_bundles(take(kvq::bundle_floats(k)));
    values.find_bundles(take(kvq::bundle_floats(v)));
    transposed = take(kvq::transposed_floats(k));
    runs_of_keys = take(kvq::run_floats(k)), runs_of_values = take(kvq::run_floats(v));
    across_keys = take(kvq::across_floats(k)), across_values = take(kvq::across_floats(v));
  }

  int64_t rows_of(int64_t block) const { return minimum(kRowBlock, span.rows - block * kRowBlock); }
  float* q_of(int64_t block) const { return q + block * kRowBlock * k.row_floats(); }
  float* scores_of(int64_t block) const { return scores + block * kRowBlock * kPadded; }
  float* sums_of(int64_t block) const { return sums + block * kRowBlock * v.row_floats(); }
  float* bias_of_block(int64_t block) const { return bias + block * kRowBlock * kLanes; }
  float* zero_sum_of(int64_t row, int64_t group) const { return zero_sums + (row * v_groups + group) * kLanes; }

  Decoder decoder(const Body& body, const Arrays& arrays, const Packed& packed) const {
    return {body, arrays, packed, span.capacity, elements, token_scale, token_zero, scale, zero, angle_scale, angle_zero};
  }

  Runs key_runs() const { return {k, span.keys.runs, span.capacity, runs_of_keys}; }
  Runs value_runs() const { return {v, span.values.runs, span.capacity, runs_of_values}; }

  void start() {
    const float root = __builtin_sqrtf(1.0f / float(channels));
    for (int64_t r = 0; r < blocks * kRowBlock; r++) {
      float* own = q + r * k.row_floats();
      for (int64_t c = 0; c < k.row_floats(); c++) own[c] = r < span.rows && c < channels ? span.q[r * channels + c] * root : 0;
      for (int64_t c = 0; c < v.row_floats(); c++) sums[r * v.row_floats() + c] = 0;
      for (int64_t i = 0; i < kLanes; i++) total[r * kLanes + i] = 0;
      for (int64_t i = 0; i < v_groups * kLanes; i++) zero_sums[r * v_groups * kLanes + i] = 0;
      largest[r] = kNegInf;
      for (int64_t g = 0; g < k_groups; g++) {
        float sum = 0;
        for (int64_t c = g * k.group; c < (g + 1) * k.group; c++) sum += own[c];
        query_sums[r * k_groups + g] = sum;
      }
    }
    if (k.affine == kvq::kChannels && !span.windows && !k_decoded) {
      load_stored_scales(k, span.keys, 0, scale, zero);
      for (int64_t b = 0; b < blocks; b++) scale_queries(b, q_of(b));
    }
  }

  // Multiply the queries of a block by the scales of channels. What the zero points and the offset of codes add to their products goes to
  // `bias`, lane by lane, the offset times the products as they were rounded: so that it takes away what it put in.
  void scale_queries(int64_t block, float* out) {
    const float offset = offset_of(k);
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float* from = q_of(block) + r * k.padded();
      Floats added = {};
      for (int64_t c = 0; c < k.channels; c += kLanes) {
        const Floats x = load(from + c), y = x * load(scale + c);
        added += x * load(zero + c) - y * offset;
        store(out + r * k.padded() + c, y);
      }
      store(bias_of_block(block) + r * kLanes, added);
    }
  }

  // Spread the scales of groups of channels over the elements of a tile.
  void spread_scales(const Body& body, int64_t live) {
    for (int64_t t = 0; t < live; t++)
      for (int64_t c = 0; c < body.padded(); c++)
        elements[t * body.padded() + c] = c < body.channels ? token_scale[c / body.group * kTile + t] : 0.0f;
  }

  // Scores of the tile of `live` tokens from `first` on.
  void score_tile(const Transposed& across, const RunsAcross& runs, int64_t first, int64_t live) {
    if (RunsAcross::served(k)) return score_runs(runs, first, live);
    if (k_decoded) return score_decoded(first, live);
    if (Transposed::served(k)) return score_transposed(across, first, live);
    if (k.affine == kvq::kChannelGroups) {
      load_token_scales(k, span.keys, span.capacity, first, live, token_scale, token_zero);
      if (k.group % kLanes == 0) {
        for (int64_t b = 0; b < blocks; b++)
          score<Scaling::kTokens>(keys, rows_of(b), q_of(b), first, 0, live, {token_scale, token_zero}, scores_of(b));
        return;
      }
      spread_scales(k, live);
      for (int64_t b = 0; b < blocks; b++) {
        score<Scaling::kElements>(keys, rows_of(b), q_of(b), first, 0, live, {elements, nullptr}, scores_of(b));
        for (int64_t r = 0; r < rows_of(b); r++)
          for (int64_t g = 0; g < k_groups; g++)
            add_to_scores(b, r, live, query_sums[(b * kRowBlock + r) * k_groups + g], token_zero + g * kTile);
      }
      return;
    }
    const bool grouped = k.affine == kvq::kTokenGroups;
    const int64_t step = grouped ? divisor(k.group, kTile) : kTile;
    for (int64_t at = 0; at < live; at += step) {
      if (grouped) load_stored_scales(k, span.keys, (first + at) / k.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        if (grouped) scale_queries(b, scaled);
        const float* own = grouped ? scaled : q_of(b);
        score<Scaling::kNone>(keys, rows_of(b), own, first, at, minimum(at + step, live), {nullptr, bias_of_block(b)}, scores_of(b));
      }
    }
  }

  // Scores of whole spans: those of tokens from `live` on may be anything.
  void score_transposed(const Transposed& across, int64_t first, int64_t live) {
    const bool scaled_tokens = k.affine == kvq::kChannelGroups, grouped = k.affine == kvq::kTokenGroups;
    if (scaled_tokens) load_token_scales(k, span.keys, span.capacity, first, live, token_scale, token_zero);
    const int64_t step = grouped ? divisor(k.group, k.span) : k.span;
    for (int64_t at = 0; at < live; at += step) {
      if (at % k.span == 0) across.read(first + at);
      const bool begins = at == 0 || (first + at) % k.group == 0;
      if (grouped && begins) load_stored_scales(k, span.keys, (first + at) / k.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        if (grouped && (begins || blocks > 1)) scale_queries(b, scaled);
        float starts[kRowBlock];
        for (int64_t r = 0; r < rows_of(b); r++) starts[r] = scaled_tokens ? 0 : sum_of_lanes(load(bias_of_block(b) + r * kLanes));
        const Affinity affinity = scaled_tokens ? Affinity{token_scale + at, token_zero + at} : Affinity{};
        const float *own = grouped ? scaled : q_of(b), *own_sums = query_sums + b * kRowBlock * k_groups;
        across.score(rows_of(b), own, at % k.span, step, starts, own_sums, affinity, scores_of(b) + at);
      }
    }
  }

  // Scores of whole groups of kDecoded tokens: those of tokens from `live` on may be anything.
  void score_runs(const RunsAcross& runs, int64_t first, int64_t live) {
    const Decoder decoder = this->decoder(k, span.keys, keys);
    for (int64_t at = 0; at < live; at += kDecoded) {
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
    for (int64_t b = 0; b < blocks; b++) runs.weigh(first, live, rows_of(b), scores_of(b), weights, sums_of(b));
  }

  void score_decoded(int64_t first, int64_t live) {
    const Decoder decoder = this->decoder(k, span.keys, keys);
    const Runs runs = key_runs();
    for (int64_t at = 0; at < live; at += kDecoded) {
      const void* rows[kDecoded];
      const int64_t count = minimum(kDecoded, live - at);
      int64_t type = kvq::kFloat32;
      if (k_runs) runs.keys(first + at, count, rows);
      else type = decoder.rows(first + at, count, rows);
      for (int64_t b = 0; b < blocks; b++) {
        if (k.rotated) decoder.turn_back(first + at, rows_of(b), q_of(b), scaled);
        if (k_runs) runs.order(rows_of(b), scaled);
        const float* own = k.rotated ? scaled : q_of(b);
        score_exact(rows_of(b), rows, type, count, vectors(), own, k.row_floats(), scores_of(b) + at);
      }
    }
  }

  void weigh_decoded(int64_t first, int64_t live) {
    const Decoder decoder = this->decoder(v, span.values, values);
    const Runs runs = value_runs();
    const int64_t read = v_runs ? runs.vectors_of_values() : vectors();
    for (int64_t at = 0; at < live; at += kDecoded) {
      const void* rows[kDecoded];
      const int64_t count = minimum(kDecoded, live - at);
      int64_t type = kvq::kFloat32;
      if (v_runs) runs.values(first + at, count, rows);
      else type = decoder.rows(first + at, count, rows);
      for (int64_t b = 0; b < blocks; b++)
        weigh_exact(rows_of(b), rows, type, count, read, scores_of(b) + at, v.row_floats(), sums_of(b));
    }
  }

  int64_t vectors() const { return (channels + kLanes - 1) / kLanes; }

  // scores[r, 0 .. live - 1] += factor * added[t]; both reach to whole vectors.
  void add_to_scores(int64_t block, int64_t r, int64_t live, float factor, const float* added) const {
    float* out = scores_of(block) + r * kPadded;
    for (int64_t t = 0; t < live; t += kLanes) store(out + t, load(out + t) + load(added + t) * factor);
  }

  // Turn the scores of a block into weights exp(score - m), 0 where a row does not see the token.
  void weights_of_tile(int64_t block, int64_t first, int64_t live) {
    const int64_t padded = rounded(live);
    for (int64_t i = 0; i < rows_of(block); i++) {
      const int64_t row = block * kRowBlock + i;
      float* out = scores_of(block) + i * kPadded;
      const int64_t seen = span.windows ? live : maximum(0, minimum(span.limits[row % span.queries] - first, live));
      for (int64_t t = seen; t < padded; t++) out[t] = kNegInf;
      Floats most = splat(largest[row]);
      for (int64_t t = 0; t < padded; t += kLanes) most = larger(load(out + t), most);
      const float level = largest_lane(most);
      if (level > largest[row]) shrink(row, exp_of(splat(largest[row] - level))[0]);
      largest[row] = level;
      if (level == kNegInf) {  // nothing seen yet: exp(0) is no weight
        for (int64_t t = 0; t < padded; t++) out[t] = 0;
        continue;
      }
      Floats sum = load(total + row * kLanes);
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats p = exp_of(load(out + t) - level);
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
    for (int64_t g = 0; g < v_groups; g++) store(zero_sum_of(row, g), load(zero_sum_of(row, g)) * factor);
  }

  // Add the weighted values of the tile.
  void weigh_tile(const RunsAcross& runs, int64_t first, int64_t live) {
    if (RunsAcross::served(v)) return weigh_runs(runs, first, live);
    if (v_decoded) return weigh_decoded(first, live);
    if (v.affine == kvq::kChannelGroups) {
      const bool whole = v.group % kLanes == 0;
      load_token_scales(v, span.values, span.capacity, first, live, token_scale, token_zero);
      if (!whole) spread_scales(v, live);
      for (int64_t b = 0; b < blocks; b++) {
        for (int64_t g = 0; g < v_groups; g++) scale_weights(b, g, live);
        if (whole) weigh<false, false>(values, rows_of(b), {weights, kRowBlock * kPadded}, first, 0, live, nullptr, nullptr, sums_of(b));
        else weigh<true, true>(values, rows_of(b), {scores_of(b), 0}, first, 0, live, elements, nullptr, sums_of(b));
      }
      return;
    }
    const bool grouped = v.affine == kvq::kTokenGroups;
    const int64_t step = grouped ? divisor(v.group, kTile) : kTile;
    for (int64_t at = 0; at < live; at += step) {
      const int64_t end = minimum(at + step, live);
      if (grouped) load_channel_scales(v, span.values, (first + at) / v.group, scale, zero);
      for (int64_t b = 0; b < blocks; b++) {
        weigh<true, false>(values, rows_of(b), {scores_of(b), 0}, first, at, end, nullptr, grouped ? scale : nullptr, sums_of(b));
        if (grouped) add_zeros(b, at, end);
      }
    }
  }

  // Add the zero points of channels for the tokens from .. to - 1.
  void add_zeros(int64_t block, int64_t from, int64_t to) {
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float all = sum_of(scores_of(block) + r * kPadded, from, to);
      float* own = sums_of(block) + r * v.padded();
      for (int64_t c = 0; c < v.channels; c += kLanes) store(own + c, load(own + c) + load(zero + c) * all);
    }
  }

  // Multiply the weights of a block by the scales of a group of channels, into `weights`, and add up their products with its zero points.
  void scale_weights(int64_t block, int64_t group, int64_t live) {
    const float *s = token_scale + group * kTile, *z = token_zero + group * kTile;
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float* p = scores_of(block) + r * kPadded;
      float *out = weights + (group * kRowBlock + r) * kPadded, *zeros = zero_sum_of(block * kRowBlock + r, group);
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
    const bool scaled_sums = v.affine == kvq::kChannels && !span.windows && !v_decoded;
    if (scaled_sums) load_channel_scales(v, span.values, 0, scale, zero);
    for (int64_t r = 0; r < span.rows; r++) {
      const float all = sum_of_lanes(load(total + r * kLanes));
      float *own = sums + r * v.row_floats(), *out = span.o + r * channels;
      span.m[r] = largest[r];
      span.l[r] = all;
      if (v_runs && !span.windows) {
        value_runs().synthesize(own, all, out);
        continue;
      }
      for (int64_t g = 0; g < v_groups; g++) {
        const float zeros = sum_of_lanes(load(zero_sum_of(r, g)));
        for (int64_t c = g * v.group; c < (g + 1) * v.group; c++) own[c] += zeros;
      }
      for (int64_t c = 0; c < channels; c++) out[c] = scaled_sums ? own[c] * scale[c] + zero[c] * all : own[c];
    }
  }

  // Point at rows of whole vectors: where they lie, or copied to `elements`; return the type of their numbers.
  int64_t widen(const void* const* stored, int64_t count, const void** rows) {
    const int64_t type = span.windows->type, padded = vectors() * kLanes;
    for (int64_t i = 0; i < count; i++) {
      rows[i] = stored[i];
      if (channels == padded) continue;
      float* copy = elements + i * padded;
      load_floats(stored[i], type, 0, channels, copy);
      for (int64_t c = channels; c < padded; c++) copy[c] = 0;
      rows[i] = copy;
    }
    return channels == padded ? type : int64_t(kvq::kFloat32);
  }

  // Attend to a tile of tokens of the windows.
  void add_exact(const void* const* stored_keys, const void* const* stored_values, int64_t count) {
    const void* rows[kTile];
    int64_t type = widen(stored_keys, count, rows);
    for (int64_t b = 0; b < blocks; b++) {
      score_exact(rows_of(b), rows, type, count, vectors(), q_of(b), k.row_floats(), scores_of(b));
      weights_of_tile(b, 0, count);
    }
    type = widen(stored_values, count, rows);
    for (int64_t b = 0; b < blocks; b++) weigh_exact(rows_of(b), rows, type, count, vectors(), scores_of(b), v.row_floats(), sums_of(b));
  }

  void run_windows() {
    const kvq::Windows& windows = *span.windows;
    const int64_t bytes = channels * (windows.type == kvq::kFloat32 ? 4 : 2);
    const void *stored_keys[kTile], *stored_values[kTile];
    const uint8_t* seen = windows.seen;
    int64_t count = 0;
    for (int window = 0; window < 2; window++) {
      for (int64_t t = 0; t < windows.tokens[window]; t++) {
        if (!*seen++) continue;  // what is not seen may be anything
        stored_keys[count] = static_cast<const char*>(windows.keys[window]) + t * bytes;
        stored_values[count] = static_cast<const char*>(windows.values[window]) + t * bytes;
        if (++count < kTile) continue;
        add_exact(stored_keys, stored_values, count);
        count = 0;
      }
    }
    if (count) add_exact(stored_keys, stored_values, count);
  }

  void run_body() {
    const Transposed across(keys, transposed);
    const Runs own_keys = key_runs(), own_values = value_runs();
    const RunsAcross runs(own_keys, across_keys), runs_of_v(own_values, across_values);
    if (k_runs) RunsAcross::served(k) ? runs.order_keys(span.keys.turns) : own_keys.order_keys(span.keys.turns);
    if (v_runs && !RunsAcross::served(v)) own_values.clear();
    for (int64_t first = span.first; first < span.last; first += kTile) {
      const int64_t live = minimum(kTile, span.last - first);
      score_tile(across, runs, first, live);
      for (int64_t b = 0; b < blocks; b++) weights_of_tile(b, first, live);
      weigh_tile(runs_of_v, first, live);
    }
  }

  void run() {
    start();
    if (span.windows) run_windows();
    else run_body();
    finish();
  }
};

}  // namespace
