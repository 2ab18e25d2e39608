// The state of one call of attention (attention.h): its part of the scratch, and its queries.
#pragma once

#include "decoded.h"
#include "runs_across.h"

namespace {

using kvq::kNegInf;
using kvq::Work;

// The state of one call, in the caller's scratch.
struct AttentionState {
  const Work& work;
  const Body &k, &v;
  Packed keys, values;
  const bool k_decoded, v_decoded, k_runs, v_runs;
  int64_t channels, blocks, k_groups, v_groups;
  float *q, *scaled, *sums, *scores, *weights, *query_sums, *zero_sums, *largest, *total, *bias;
  float *token_scale, *token_zero, *elements, *scale, *zero, *angle_scale, *angle_zero, *transposed;
  float *runs_of_keys, *runs_of_values, *across_keys, *across_values;

  explicit AttentionState(const Work& described)
      : work(described), k(*work.k), v(*work.v), keys(k, work.keys), values(v, work.values),
        k_decoded(k.decoded()), v_decoded(v.decoded()), k_runs(k.form == kvq::kRuns),
        v_runs(v.form == kvq::kRuns) {
    channels = k.head_dim();
    blocks = kvq::row_blocks(work.rows);
    k_groups = k.channel_groups(), v_groups = v.channel_groups();
    const int64_t rows = blocks * kRowBlock, widest = maximum(k.row_floats(), v.row_floats()),
                  groups = maximum(k_groups, v_groups);
    float* next = work.scratch;
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
    scale = take(widest + kLanes), zero = take(widest + kLanes),
    angle_scale = take(widest + kLanes), angle_zero = take(widest + kLanes);
    keys.find_bundles(take(kvq::bundle_floats(k)));
    values.find_bundles(take(kvq::bundle_floats(v)));
    transposed = take(kvq::transposed_floats(k));
    runs_of_keys = take(kvq::run_floats(k)), runs_of_values = take(kvq::run_floats(v));
    across_keys = take(kvq::across_floats(k)), across_values = take(kvq::across_floats(v));
  }

  int64_t vectors() const { return (channels + kLanes - 1) / kLanes; }
  int64_t rows_of(int64_t block) const { return minimum(kRowBlock, work.rows - block * kRowBlock); }
  float* q_of(int64_t block) const { return q + block * kRowBlock * k.row_floats(); }
  float* scores_of(int64_t block) const { return scores + block * kRowBlock * kPadded; }
  float* sums_of(int64_t block) const { return sums + block * kRowBlock * v.row_floats(); }
  float* bias_of_block(int64_t block) const { return bias + block * kRowBlock * kLanes; }
  float* zero_sum_of(int64_t row, int64_t group) const {
    return zero_sums + (row * v_groups + group) * kLanes;
  }

  Decoder decoder(const Body& body, const Arrays& arrays, const Packed& packed) const {
    return {body,       arrays, packed, work.capacity, elements,  token_scale,
            token_zero, scale,  zero,   angle_scale,   angle_zero};
  }

  Runs key_runs() const { return {k, work.keys.runs, work.capacity, runs_of_keys}; }
  Runs value_runs() const { return {v, work.values.runs, work.capacity, runs_of_values}; }

  void start() {
    for (int64_t r = 0; r < blocks * kRowBlock; r++) {
      float* row = q + r * k.row_floats();
      for (int64_t c = 0; c < k.row_floats(); c++)
        row[c] = r < work.rows && c < channels ? work.q[r * channels + c] * work.scale : 0;
      for (int64_t c = 0; c < v.row_floats(); c++) sums[r * v.row_floats() + c] = 0;
      for (int64_t i = 0; i < kLanes; i++) total[r * kLanes + i] = 0;
      for (int64_t i = 0; i < v_groups * kLanes; i++) zero_sums[r * v_groups * kLanes + i] = 0;
      largest[r] = kNegInf;
      for (int64_t g = 0; g < k_groups; g++) {
        float sum = 0;
        for (int64_t c = g * k.group; c < (g + 1) * k.group; c++) sum += row[c];
        query_sums[r * k_groups + g] = sum;
      }
    }
    if (k.affine == kvq::kChannels && !work.windows && !k_decoded) {
      load_stored_scales(k, work.keys, 0, scale, zero);
      for (int64_t b = 0; b < blocks; b++) scale_queries(b, q_of(b));
    }
  }

  // Multiply the queries of a block by the scales of channels. `bias` receives, lane by lane, what
  // zero points and the offset of codes add to the products. The offset times the rounded products
  // is subtracted, so that it cancels exactly.
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
      spread_groups(body, token_scale + t, elements + t * body.padded());
  }
};

}  // namespace
