// Attention over a run of body tokens, for the processor that the translation unit is compiled for.
//
//   scores   q . (code s + z)  =  sum_c (q s)_c code_c + q . z      groups of tokens, or one scale for each channel: s meets the query once
//                              =  sum_g q_g . (code s)_g + z_g sum(q_g)    groups of channels: s meets the code, z the sum of the query
//   values   p . (code s + z)  =  (sum_t p_t code_t) s + (sum_t p_t) z     groups of tokens, or of channels: s meets the weighted sum
//                              =  sum_t (p s)_t code_t + sum_t p_t z_t     groups of channels: s meets the weight
//
// A tile of kTile tokens is unpacked once for all query rows, which go in blocks of kRowBlock. Online softmax, all in fp32.
#pragma once

#include "body.h"
#include "tile.h"
#include "vectors.h"

namespace {

using kvq::kNegInf;
using kvq::kRowBlock;
using kvq::Span;

constexpr int64_t kPadded = kTile + 8;  // tokens of a buffer of scores: kernels write up to 7 too many

int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// scores[r, t] = q[r] . tile[t] for R query rows; tokens are rounded up to a multiple of 8 / R.
template <int R>
void dot_rows(const float* q, const float* tile, int64_t tokens, int64_t width, float* scores) {
  constexpr int kTokens = R == 1 ? 8 : R == 2 ? 4 : 2;
  for (int64_t t = 0; t < tokens; t += kTokens) {
    Floats sums[8] = {};
    const float* rows = tile + t * width;
    for (int64_t c = 0; c < width; c += kLanes) {
      Floats x[R];
      for (int r = 0; r < R; r++) x[r] = load(q + r * width + c);
      for (int i = 0; i < kTokens; i++) {
        const Floats y = load(rows + i * width + c);
        for (int r = 0; r < R; r++) sums[r * kTokens + i] += x[r] * y;
      }
    }
    float totals[8];
    add_lanes(sums, totals);
    for (int r = 0; r < R; r++) std::memcpy(scores + r * kPadded + t, totals + r * kTokens, sizeof(float) * kTokens);
  }
}

void dots(int64_t rows, const float* q, const float* tile, int64_t tokens, int64_t width, float* scores) {
  switch (rows) {
    case 1: return dot_rows<1>(q, tile, tokens, width, scores);
    case 2: return dot_rows<2>(q, tile, tokens, width, scores);
    case 3: return dot_rows<3>(q, tile, tokens, width, scores);
    default: return dot_rows<4>(q, tile, tokens, width, scores);
  }
}

// sums[r] += (sum_t weights[r, t] * tile[t]) * scale + total[r] * zero for V vectors of channels; without kAffine, scale is 1 and zero 0.
template <int R, int V, bool kAffine>
inline void weigh_block(const float* weights, const float* tile, int64_t tokens, int64_t width, const float* scale, const float* zero,
                        const float* total, float* sums, int64_t stride) {
  Floats acc[R][V] = {};
  for (int64_t t = 0; t < tokens; t++) {
    Floats y[V];
    for (int v = 0; v < V; v++) y[v] = load(tile + t * width + v * kLanes);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) acc[r][v] += y[v] * weights[r * kPadded + t];
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) {
      float* at = sums + r * stride + v * kLanes;
      Floats x = acc[r][v];
      if (kAffine) x = x * load(scale + v * kLanes) + load(zero + v * kLanes) * total[r];
      store(at, load(at) + x);
    }
  }
}

// Weighted values of channels first .. last - 1.
template <int R, bool kAffine>
void weigh_rows(const float* weights, const float* tile, int64_t tokens, int64_t width, int64_t first, int64_t last, const float* scale,
                const float* zero, const float* total, float* sums) {
  int64_t c = first;
  for (; c + 2 * kLanes <= last; c += 2 * kLanes)
    weigh_block<R, 2, kAffine>(weights, tile + c, tokens, width, scale + c, zero + c, total, sums + c, width);
  for (; c < last; c += kLanes)
    weigh_block<R, 1, kAffine>(weights, tile + c, tokens, width, scale + c, zero + c, total, sums + c, width);
}

template <bool kAffine>
void weigh(int64_t rows, const float* weights, const float* tile, int64_t tokens, int64_t width, int64_t first, int64_t last,
           const float* scale, const float* zero, const float* total, float* sums) {
  switch (rows) {
    case 1: return weigh_rows<1, kAffine>(weights, tile, tokens, width, first, last, scale, zero, total, sums);
    case 2: return weigh_rows<2, kAffine>(weights, tile, tokens, width, first, last, scale, zero, total, sums);
    case 3: return weigh_rows<3, kAffine>(weights, tile, tokens, width, first, last, scale, zero, total, sums);
    default: return weigh_rows<4, kAffine>(weights, tile, tokens, width, first, last, scale, zero, total, sums);
  }
}

// The state of one call: everything is in the caller's scratch.
struct Attention {
  const Span& span;
  const Body &k, &v;
  int64_t blocks, k_groups, v_groups;
  float *tile, *q, *scaled, *sums, *scores, *weights, *query_sums, *weight_sums, *largest, *total, *bias;
  float *token_scale, *token_zero, *scale, *zero;

  explicit Attention(const Span& given) : span(given), k(*given.k), v(*given.v) {
    blocks = kvq::row_blocks(span.rows);
    k_groups = k.channels / k.group, v_groups = v.channels / v.group;
    const int64_t rows = blocks * kRowBlock, widest = maximum(k.padded(), v.padded());
    float* next = span.scratch;
    auto take = [&next](int64_t count) {
      float* taken = next;
      next += (count + 15) / 16 * 16;
      return taken;
    };
    tile = take((kTile + 8) * widest);
    q = take(rows * k.padded());
    scaled = take(kRowBlock * k.padded());
    sums = take(rows * v.padded());
    scores = take(blocks * kPadded * kRowBlock);
    weights = take(kPadded * kRowBlock);
    query_sums = take(rows * k_groups);
    weight_sums = take(rows * v_groups);
    largest = take(rows), total = take(rows), bias = take(rows);
    token_scale = take(kTile * maximum(k_groups, v_groups));
    token_zero = take(kTile * maximum(k_groups, v_groups));
    scale = take(widest), zero = take(widest);
  }

  int64_t rows_of(int64_t block) const { return minimum(kRowBlock, span.rows - block * kRowBlock); }
  float* q_of(int64_t block) const { return q + block * kRowBlock * k.padded(); }
  float* scores_of(int64_t block) const { return scores + block * kPadded * kRowBlock; }
  float* sums_of(int64_t block) const { return sums + block * kRowBlock * v.padded(); }

  void start() {
    const float root = __builtin_sqrtf(1.0f / float(k.channels));
    for (int64_t i = 0; i < (kTile + 8) * maximum(k.padded(), v.padded()); i++) tile[i] = 0;
    for (int64_t r = 0; r < blocks * kRowBlock; r++) {
      for (int64_t c = 0; c < k.padded(); c++)
        q[r * k.padded() + position(c)] = r < span.rows && c < k.channels ? span.q[r * k.channels + c] * root : 0;
      for (int64_t c = 0; c < v.padded(); c++) sums[r * v.padded() + c] = 0;
      largest[r] = kNegInf;
      total[r] = 0;
      for (int64_t g = 0; g < k_groups; g++) {
        float sum = 0;
        for (int64_t c = g * k.group; c < minimum((g + 1) * k.group, k.channels); c++) sum += q[r * k.padded() + position(c)];
        query_sums[r * k_groups + g] = sum;
      }
    }
    for (int64_t i = 0; i < blocks * kPadded * kRowBlock; i++) scores[i] = 0;
    if (k.affine == kvq::kChannels) {
      load_channel_scales(k, span.keys, 0, scale, zero);
      for (int64_t b = 0; b < blocks; b++) scale_queries(b, q_of(b));
    }
    for (int64_t g = 0; g < v_groups; g++)
      for (int64_t r = 0; r < blocks * kRowBlock; r++) weight_sums[g * blocks * kRowBlock + r] = 0;
  }

  // Multiply the queries of a block by the scales of channels; their products with the zero points go to `bias`.
  void scale_queries(int64_t block, float* out) {
    for (int64_t r = 0; r < rows_of(block); r++) {
      const float* from = q_of(block) + r * k.padded();
      Floats sum = {};
      for (int64_t c = 0; c < k.padded(); c += kLanes) {
        const Floats x = load(from + c);
        sum += x * load(zero + c);
        store(out + r * k.padded() + c, x * load(scale + c));
      }
      float whole = 0;
      for (int i = 0; i < kLanes; i++) whole += sum[i];
      bias[block * kRowBlock + r] = whole;
    }
  }

  // scores[r, from .. to - 1] += factor[r] * added[t], or factor[r] alone.
  void add_to_scores(int64_t block, int64_t from, int64_t to, const float* factor, int64_t apart, const float* added) {
    for (int64_t r = 0; r < rows_of(block); r++) {
      float* out = scores_of(block) + r * kPadded;
      const float x = factor[r * apart];
      if (added) for (int64_t t = from; t < to; t++) out[t] += x * added[t];
      else for (int64_t t = from; t < to; t++) out[t] += x;
    }
  }

  // Scores of the tile of `live` tokens from `first` on, of which `tokens` are stored.
  void score_tile(int64_t first, int64_t tokens, int64_t live) {
    if (k.affine == kvq::kChannelGroups) {
      const bool whole = k.group % k.width == 0;
      load_token_scales(k, span.keys, span.capacity, first, live, token_scale, token_zero);
      unpack(k, span.keys, first, tokens, whole ? token_scale : nullptr, tile);
      if (!whole) scale_channels(k, tokens, token_scale, tile);
      for (int64_t b = 0; b < blocks; b++) {
        dots(rows_of(b), q_of(b), tile, live, k.padded(), scores_of(b));
        for (int64_t g = 0; g < k_groups; g++)
          add_to_scores(b, 0, live, query_sums + b * kRowBlock * k_groups + g, k_groups, token_zero + g * kTile);
      }
      return;
    }
    unpack(k, span.keys, first, tokens, nullptr, tile);
    if (k.affine == kvq::kChannels) {
      for (int64_t b = 0; b < blocks; b++) {
        dots(rows_of(b), q_of(b), tile, live, k.padded(), scores_of(b));
        add_to_scores(b, 0, live, bias + b * kRowBlock, 1, nullptr);
      }
      return;
    }
    const int64_t step = divisor(k.group, kTile);
    for (int64_t at = 0; at < live; at += step) {
      load_channel_scales(k, span.keys, (first + at) / k.group, scale, zero);
      const int64_t count = minimum(step, live - at);
      for (int64_t b = 0; b < blocks; b++) {
        scale_queries(b, scaled);
        dots(rows_of(b), scaled, tile + at * k.padded(), count, k.padded(), scores_of(b) + at);
        add_to_scores(b, at, at + count, bias + b * kRowBlock, 1, nullptr);
      }
    }
  }

  // Turn the scores of a block into weights exp(score - m), 0 where a row does not see the token.
  void weights_of_tile(int64_t block, int64_t first, int64_t live) {
    const int64_t padded = (live + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < rows_of(block); i++) {
      const int64_t row = block * kRowBlock + i;
      float* out = scores_of(block) + i * kPadded;
      const int64_t seen = maximum(0, minimum(span.limits[row % span.queries] - first, live));
      for (int64_t t = seen; t < padded; t++) out[t] = kNegInf;
      Floats most = splat(largest[row]);
      for (int64_t t = 0; t < padded; t += kLanes) most = larger(load(out + t), most);
      float level = most[0];
      for (int j = 1; j < kLanes; j++) level = most[j] > level ? most[j] : level;
      if (level > largest[row]) shrink(row, exp_of(splat(largest[row] - level))[0]);
      largest[row] = level;
      Floats sum = {};
      for (int64_t t = 0; t < padded; t += kLanes) {
        const Floats p = exp_of(load(out + t) - level);
        store(out + t, p);
        sum += p;
      }
      if (level == kNegInf)  // nothing seen yet: exp(0) is no weight
        for (int64_t t = 0; t < padded; t++) out[t] = 0;
      else
        for (int j = 0; j < kLanes; j++) total[row] += sum[j];
    }
  }

  void shrink(int64_t row, float factor) {
    total[row] *= factor;
    float* at = sums + row * v.padded();
    for (int64_t c = 0; c < v.padded(); c += kLanes) store(at + c, load(at + c) * factor);
    for (int64_t g = 0; g < v_groups; g++) weight_sums[g * blocks * kRowBlock + row] *= factor;
  }

  // Add the weighted values of the tile.
  void weigh_tile(int64_t first, int64_t tokens, int64_t live) {
    const int64_t width = v.padded();
    if (v.affine == kvq::kChannelGroups) {
      const bool folded = v.group % kWords == 0;
      load_token_scales(v, span.values, span.capacity, first, live, token_scale, token_zero);
      unpack(v, span.values, first, tokens, nullptr, tile);
      if (!folded) scale_channels(v, tokens, token_scale, tile);
      for (int64_t b = 0; b < blocks; b++) {
        const float* p = scores_of(b);
        if (!folded) weigh<false>(rows_of(b), p, tile, live, width, 0, width, tile, tile, nullptr, sums_of(b));
        for (int64_t g = 0; g < v_groups; g++) {
          const float *s = token_scale + g * kTile, *z = token_zero + g * kTile;
          float* zeros = weight_sums + g * blocks * kRowBlock + b * kRowBlock;
          for (int64_t r = 0; r < rows_of(b); r++) {
            Floats added = {};
            for (int64_t t = 0; t < kTile; t += kLanes) {  // s and z are 0 from `live` on
              const Floats weight = load(p + r * kPadded + t);
              added += weight * load(z + t);
              store(weights + r * kPadded + t, weight * load(s + t));
            }
            for (int j = 0; j < kLanes; j++) zeros[r] += added[j];
          }
          if (folded)
            weigh<false>(rows_of(b), weights, tile, live, width, g * v.group, (g + 1) * v.group, tile, tile, nullptr, sums_of(b));
        }
      }
      return;
    }
    unpack(v, span.values, first, tokens, nullptr, tile);
    if (v.affine == kvq::kChannels) {
      for (int64_t b = 0; b < blocks; b++)
        weigh<false>(rows_of(b), scores_of(b), tile, live, width, 0, width, tile, tile, nullptr, sums_of(b));
      return;
    }
    const int64_t step = divisor(v.group, kTile);
    for (int64_t at = 0; at < live; at += step) {
      load_channel_scales(v, span.values, (first + at) / v.group, scale, zero);
      const int64_t count = minimum(step, live - at);
      for (int64_t b = 0; b < blocks; b++) {
        const float* p = scores_of(b) + at;
        float all[kRowBlock] = {};
        for (int64_t r = 0; r < rows_of(b); r++)
          for (int64_t t = 0; t < count; t++) all[r] += p[r * kPadded + t];
        weigh<true>(rows_of(b), p, tile + at * width, count, width, 0, width, scale, zero, all, sums_of(b));
      }
    }
  }

  void finish() {
    if (v.affine == kvq::kChannels) load_channel_scales(v, span.values, 0, scale, zero);
    for (int64_t r = 0; r < span.rows; r++) {
      span.m[r] = largest[r];
      span.l[r] = total[r];
      for (int64_t c = 0; c < v.channels; c++) {
        float x = sums[r * v.padded() + position(c)];
        if (v.affine == kvq::kChannelGroups) x += weight_sums[c / v.group * blocks * kRowBlock + r];
        if (v.affine == kvq::kChannels) x = x * scale[position(c)] + zero[position(c)] * total[r];
        span.o[r * v.channels + c] = x;
      }
    }
  }

  void run() {
    start();
    for (int64_t first = span.first; first < span.last; first += kTile) {
      const int64_t tokens = minimum(kTile, span.capacity - first), live = minimum(tokens, span.last - first);
      score_tile(first, tokens, live);
      for (int64_t b = 0; b < blocks; b++) weights_of_tile(b, first, live);
      weigh_tile(first, tokens, live);
    }
    finish();
  }
};

}  // namespace
