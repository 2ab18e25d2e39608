// Vectors of a body in fp32, a few tokens at a time, in the first level of the cache. This is for
// formats that are more than a code, a scale and a zero point, which products.h multiplies in
// registers.
#pragma once

#include "products.h"

namespace {

using kvq::kDecoded;
using kvq::kNear;

// cos and sin of x, to 2 units in the last place for angles of a few turns. Source of the
// polynomials: minimax on a quarter turn, Cephes.
inline void cos_sin_of(Floats x, Floats& cos, Floats& sin) {
  const Floats n = (x * 0.636619772367581343f + kRounding) - kRounding;  // quarter turns
  const Floats r = ((x - n * 1.5703125f) - n * 4.837512969970703e-4f) - n * 7.54978995489188e-8f;
  const Floats square = r * r;
  const Floats s =
      ((splat(-1.9515295891e-4f) * square + 8.3321608736e-3f) * square - 1.6666654611e-1f) *
          square * r +
      r;
  const Floats c = ((splat(2.443315711809948e-5f) * square - 1.388731625493765e-3f) * square +
                    4.166664568298827e-2f) *
                       square * square -
                   square * 0.5f + 1.0f;
  const Ints quarter = __builtin_convertvector(n, Ints), odd = (quarter & 1) != 0;
  const Uints turned = (Uints)(quarter & 2) << 30, across = (Uints)((quarter + 1) & 2) << 30;
  cos = (Floats)((Uints)choose(odd, s, c) ^ across);
  sin = (Floats)((Uints)choose(odd, c, s) ^ turned);
}

// Rotate pairs (x_i, x_{i + half}) forward or back by angles with the given cosines and sines.
// `out` may be `x`.
template <bool kBack>
inline void turn(const float* x, const float* cosines, const float* sines, int64_t half,
                 float* out) {
  int64_t c = 0;
  for (; c + kLanes <= half; c += kLanes) {
    const Floats a = load(x + c), b = load(x + half + c), cos = load(cosines + c),
                 sin = kBack ? -load(sines + c) : load(sines + c);
    store(out + c, a * cos - b * sin);
    store(out + half + c, b * cos + a * sin);
  }
  for (; c < half; c++) {
    const float a = x[c], b = x[half + c], cos = cosines[c], sin = kBack ? -sines[c] : sines[c];
    out[c] = a * cos - b * sin;
    out[half + c] = b * cos + a * sin;
  }
}

// The keys or values of one KV head. The scratch is the caller's: [kDecoded, row_floats] of
// `vectors`, and the scales and zero points of a tile's tokens, or of channels (and of angles).
struct Decoder {
  const Body& body;
  const Arrays& arrays;
  const Packed& packed;
  int64_t capacity;
  float *vectors, *token_scale, *token_zero, *scale, *zero, *angle_scale, *angle_zero;

  // Point at `count` tokens from body token `first` on, a multiple of kDecoded. Return the type of
  // their numbers.
  int64_t rows(int64_t first, int64_t count, const void** at) const {
    const int64_t stride = body.row_floats(), padded = vectors_of(body) * kLanes;
    if (body.form == kvq::kRows && body.channels == padded) {
      const int64_t bytes = body.channels * (body.scale_type == kvq::kFloat32 ? 4 : 2);
      for (int64_t i = 0; i < count; i++)
        at[i] = static_cast<const char*>(arrays.scale) + (first + i) * bytes;
      return body.scale_type;
    }
    if (body.form == kvq::kRows) widen(first, count);
    else if (body.form == kvq::kFloats) decode_floats(first, count);
    else if (body.affine == kvq::kChannelGroups) decode_token_scales(first, count);
    else decode_channel_scales(first, count);
    if (body.pool) add_outliers(first, count);
    const int64_t half = body.head_dim() / 2;
    for (int64_t i = 0; i < count; i++) {
      float* vector = vectors + i * stride;
      if (body.rotated)
        turn<false>(vector, arrays.turns.steps + i * half,
                    arrays.turns.steps + (kDecoded + i) * half, half, vector);
      at[i] = vector;
    }
    return kvq::kFloat32;
  }

  // Turn queries back by the position of body token `first`, a multiple of kDecoded: q . R(p + d) k
  // = R(-p) q . R(d) k.
  void turn_back(int64_t first, int64_t rows, const float* q, float* out) const {
    const int64_t half = body.head_dim() / 2, stride = body.row_floats();
    const int64_t run = first / kDecoded;
    const float *near = arrays.turns.near + run % kNear * half,
                *far = arrays.turns.far + run / kNear * half;
    for (int64_t r = 0; r < rows; r++) {
      turn<true>(q + r * stride, far, far + arrays.turns.far_count * half, half, out + r * stride);
      turn<true>(out + r * stride, near, near + arrays.turns.near_count * half, half,
                 out + r * stride);
      for (int64_t c = 2 * half; c < stride; c++) out[r * stride + c] = 0;
    }
  }

 private:
  void decode_floats(int64_t first, int64_t count) const {
    for_numbers(first, 0, count, [&](int64_t t, const auto& field, Floats x) {
      const Uints code = (Uints)x << (32 - kMantissa);  // the top of the mantissa
      store(vectors + t * body.row_floats() + field.vector * kLanes, from_e4m3(code));
    });
  }

  void widen(int64_t first, int64_t count) const {
    const int64_t stride = body.row_floats();
    for (int64_t i = 0; i < count; i++) {
      float* vector = vectors + i * stride;
      load_floats(arrays.scale, body.scale_type, (first + i) * body.channels, body.channels,
                  vector);
      for (int64_t c = body.channels; c < stride; c++) vector[c] = 0;
    }
  }

  // Call function(numbers, token of the tile, a vector's field, its number) for the tokens from ..
  // to - 1.
  template <class Function>
  void for_numbers(int64_t first, int64_t from, int64_t to, Function function) const {
    packed.with_codes([&](const auto& numbers) {
      for (int64_t at = from; at < to;) {
        const TokenRun run = packed.run_from(first, at, to);
        const Bundle *bundles = packed.bundles_of(run.slot),
                     *end = bundles + packed.count_of(run.slot);
        const Rows words(packed, run.row);
        for (int64_t i = 0; i < run.count; i++)
          for (const Bundle* bundle = bundles; bundle < end; bundle++) {
            const Uints low = words.load(0, i, bundle->place[0]),
                        high = body.sets() == 2 ? words.load(1, i, bundle->place[1]) : Uints{};
            for (int j = 0; j < bundle->size; j++) {
              const auto& field = bundle->fields[j];
              function(at + i, field,
                       numbers.at(low, high, shift_by(field.shift[0]), shift_by(field.shift[1])));
            }
          }
        at += run.count;
      }
    });
  }

  void decode_token_scales(int64_t first, int64_t count) const {
    const int64_t stride = body.row_floats();
    const bool whole = body.whole_groups(kLanes);
    load_token_scales(body, arrays, capacity, first, count, token_scale, token_zero);
    for_numbers(first, 0, count, [&](int64_t t, const auto& field, Floats x) {
      float* out = vectors + t * stride + field.vector * kLanes;
      store(out, whole ? x * token_scale[field.group + t] + token_zero[field.group + t] : x);
    });
    alignas(64) float scales[kvq::kMaxPadded], zeros[kvq::kMaxPadded];
    for (int64_t t = 0; t < count && !whole; t++) {
      float* vector = vectors + t * stride;
      spread_groups(body, token_scale + t, scales);
      spread_groups(body, token_zero + t, zeros);
      for (int64_t c = 0; c < vectors_of(body) * kLanes; c += kLanes)
        store(vector + c, load(vector + c) * load(scales + c) + load(zeros + c));
    }
  }

  void decode_channel_scales(int64_t first, int64_t count) const {
    const int64_t stride = body.row_floats(),
                  step = body.affine == kvq::kTokenGroups
                             ? greatest_common_divisor(body.group, kDecoded)
                             : kDecoded;
    for (int64_t from = 0; from < count; from += step) {
      const int64_t to = minimum(from + step, count), group = (first + from) / body.group;
      if (body.form == kvq::kPolar) {
        decode_polar(first, from, to, group);
        continue;
      }
      load_channel_scales(body, arrays, group, scale, zero);
      for_numbers(first, from, to, [&](int64_t t, const auto& field, Floats x) {
        const int64_t c = field.vector * kLanes;
        store(vectors + t * stride + c, x * load(scale + c) + load(zero + c));
      });
    }
  }

  void decode_polar(int64_t first, int64_t from, int64_t to, int64_t group) const {
    const int64_t pairs = body.channels, padded = vectors_of(body) * kLanes,
                  stride = body.row_floats();
    const void* stored[4] = {arrays.scale, arrays.zero, arrays.angle_scale, arrays.angle_zero};
    float* loaded[4] = {scale, zero, angle_scale, angle_zero};
    for (int i = 0; i < 4; i++) {
      load_floats(stored[i], body.scale_type, group * pairs, pairs, loaded[i]);
      for (int64_t c = pairs; c < padded; c++) loaded[i][c] = 0;
    }
    const Shift of_code = shift_by(int32_t(kMantissa - body.bits)),
                of_radius = shift_by(int32_t(body.angle_bits));
    const Uints all = Uints{} + uint32_t((1 << body.bits) - 1),
                angles = Uints{} + uint32_t((1 << body.angle_bits) - 1);
    for_numbers(first, from, to, [&](int64_t t, const auto& field, Floats x) {
      const int64_t c = field.vector * kLanes;
      const Uints code = ((Uints)x >> of_code) & all;
      const Floats angle =
          (to_float(code & angles) + 0.5f) * load(angle_scale + c) + load(angle_zero + c);
      Floats radius = (to_float(code >> of_radius) + 0.5f) * load(scale + c) + load(zero + c), cos,
             sin;
      if (body.root) radius *= radius;
      cos_sin_of(angle, cos, sin);
      put(vectors + t * stride, c, pairs, radius * cos, radius * sin);
    });
    for (int64_t t = from; t < to; t++)
      for (int64_t c = 2 * pairs; c < stride; c++) vectors[t * stride + c] = 0;
  }

  // Store the numbers of those of pairs c, c + 1, ... that exist.
  static void put(float* row, int64_t c, int64_t pairs, Floats x, Floats y) {
    if (c + kLanes <= pairs) {
      store(row + c, x);
      store(row + pairs + c, y);
      return;
    }
    for (int64_t i = 0; c + i < pairs; i++) row[c + i] = x[i], row[pairs + c + i] = y[i];
  }

  // Nothing outside the vectors is written, whatever the slots hold.
  void add_outliers(int64_t first, int64_t count) const {
    const kvq::Outliers& all = arrays.outliers;
    const int64_t channels = body.channels;
    for (int64_t pool = first / body.pool; pool * body.pool < first + count; pool++) {
      const uint16_t *index = all.index + pool * all.slots, *ends = all.ends + pool * all.heads;
      const int64_t start = pool * body.pool - first, end = minimum(ends[all.head], all.slots);
      int64_t at = all.head ? ends[all.head - 1] : 0;
      for (int64_t to = end; at < to;) {  // skip the slots of tokens before the first one
        const int64_t middle = (at + to) / 2;
        if (index[middle] < -start * channels) at = middle + 1;
        else to = middle;
      }
      for (; at < end; at++) {
        const int64_t token = index[at] / uint32_t(channels) + start;
        if (token >= count) break;
        if (token < 0) continue;
        vectors[token * body.row_floats() + index[at] % uint32_t(channels)] +=
            one_float(all.residual, body.residual_type, pool * all.slots + at);
      }
    }
  }
};

}  // namespace
