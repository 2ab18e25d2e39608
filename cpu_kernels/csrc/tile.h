// From the packed words of a tile of tokens to fp32 numbers in the first level of the cache: codes, or the entries of a table.
#pragma once

#include "body.h"
#include "vectors.h"

namespace {

using kvq::Arrays;
using kvq::Body;
using kvq::kTile;

// What becomes of a code: the number bias + code, from bits alone; the code, for those of more bits than fit; or the entry of a table.
enum Kind { kNumbers, kCodes, kEntries };

// A float whose upper half is exponent and code, at the top of the mantissa's seven bits there, is 2^bits + code.
constexpr int64_t kMantissa = 7;

inline Kind kind_of(const Body& body) { return body.table ? kEntries : body.bits <= kMantissa ? kNumbers : kCodes; }
inline float bias_of(const Body& body) { return kind_of(body) == kNumbers ? float(1 << body.bits) : 0.0f; }

// How a chunk's codes are reached: words[place], moved right by `shift` bits (left, where that is negative), and `mask`, in each set.
struct Field {
  int64_t place[2];
  int shift[2];
  uint16_t mask[2];
};

inline Field field_of(const Body& body, int64_t number) {
  Field field{};
  int64_t target = kind_of(body) == kNumbers ? kMantissa - body.bits : 0;
  for (int64_t set = 0; set < body.sets(); set++) {
    const int64_t tiles = body.row_words(set) / body.width;
    field.place[set] = number % tiles * body.width;
    field.shift[set] = int(number / tiles * body.set_bits(set) - target);
    field.mask[set] = uint16_t(((1 << body.set_bits(set)) - 1) << target);
    target += body.set_bits(set);
  }
  return field;
}

template <bool kLeft>
inline Words masked(Words x, int shift, uint16_t mask) {
  return (kLeft ? x << shift : x >> shift) & mask;
}

// One chunk of the tokens of a slot: row r of words becomes token r of `out`; tokens are `stride` apart.
template <Kind kKind, bool kTwoSets, bool kScaled, bool kLeft0, bool kLeft1>
void unpack_chunk(const Body& body, const Arrays& arrays, const Field& field, int64_t row, int64_t rows, const float* scale, float* out) {
  const int64_t words0 = body.row_words(0), words1 = kTwoSets ? body.row_words(1) : 0, width = body.width, stride = body.padded();
  const uint16_t* low = arrays.words[0] + row * words0 + field.place[0];
  const uint16_t* high = kTwoSets ? arrays.words[1] + row * words1 + field.place[1] : nullptr;
  const int shift0 = kLeft0 ? -field.shift[0] : field.shift[0], shift1 = kLeft1 ? -field.shift[1] : field.shift[1];
  const uint16_t exponent = uint16_t((127 + body.bits) << kMantissa);
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < width; c += kWords) {
      Words code = masked<kLeft0>(load_words(low + r * words0 + c), shift0, field.mask[0]);
      if (kTwoSets) code |= masked<kLeft1>(load_words(high + r * words1 + c), shift1, field.mask[1]);
      if (kKind == kNumbers) code |= exponent;
      for (int part = 0; part < kParts; part++) {
        const Uints bits = part_of(code, part, kKind == kNumbers);
        Floats x = kKind == kNumbers ? (Floats)bits : kKind == kCodes ? to_float(bits) : look_up(arrays.table, bits);
        if (kScaled) x *= scale[r];
        store(out + r * stride + c + part * kLanes, x);
      }
    }
  }
}

template <Kind kKind, bool kTwoSets, bool kScaled>
inline void unpack_field(const Body& body, const Arrays& arrays, const Field& field, int64_t row, int64_t rows, const float* scale,
                         float* out) {
  const bool left0 = field.shift[0] < 0, left1 = kTwoSets && field.shift[1] < 0;
  if (left0 && left1) unpack_chunk<kKind, kTwoSets, kScaled, true, true>(body, arrays, field, row, rows, scale, out);
  else if (left0) unpack_chunk<kKind, kTwoSets, kScaled, true, false>(body, arrays, field, row, rows, scale, out);
  else if (left1) unpack_chunk<kKind, kTwoSets, kScaled, false, true>(body, arrays, field, row, rows, scale, out);
  else unpack_chunk<kKind, kTwoSets, kScaled, false, false>(body, arrays, field, row, rows, scale, out);
}

template <Kind kKind, bool kTwoSets, bool kScaled>
void unpack_as(const Body& body, const Arrays& arrays, int64_t first, int64_t tokens, const float* scale, float* out) {
  const int64_t stride = body.padded(), rows = body.span / body.slots;
  for (int64_t slot = 0; slot < body.slots; slot++) {
    for (int64_t chunk = 0; chunk < body.chunks; chunk++) {
      const Field field = field_of(body, slot * body.chunks + chunk);
      const float* own = kScaled ? scale + chunk * body.width / body.group * kTile : nullptr;
      float* to = out + chunk * body.width;
      if (body.slots == 1) {  // then spans follow each other
        unpack_field<kKind, kTwoSets, kScaled>(body, arrays, field, first, tokens, own, to);
        continue;
      }
      for (int64_t at = 0; at < tokens; at += body.span) {
        const int64_t token = at + slot * rows;
        unpack_field<kKind, kTwoSets, kScaled>(body, arrays, field, (first + at) / body.slots, rows, kScaled ? own + token : nullptr,
                                               to + token * stride);
      }
    }
  }
}

template <Kind kKind>
void unpack_kind(const Body& body, const Arrays& arrays, int64_t first, int64_t tokens, const float* scale, float* out) {
  if (body.sets() == 2) {
    if (scale) unpack_as<kKind, true, true>(body, arrays, first, tokens, scale, out);
    else unpack_as<kKind, true, false>(body, arrays, first, tokens, nullptr, out);
  } else {
    if (scale) unpack_as<kKind, false, true>(body, arrays, first, tokens, scale, out);
    else unpack_as<kKind, false, false>(body, arrays, first, tokens, nullptr, out);
  }
}

// Write tokens first .. first + tokens - 1, whole spans, to `out` [tokens, padded], channels in the order of `position`. scale: of tokens,
// [groups of channels, kTile], by which codes (with their bias) are multiplied; null for none.
void unpack(const Body& body, const Arrays& arrays, int64_t first, int64_t tokens, const float* scale, float* out) {
  switch (kind_of(body)) {
    case kNumbers: return unpack_kind<kNumbers>(body, arrays, first, tokens, scale, out);
    case kCodes: return unpack_kind<kCodes>(body, arrays, first, tokens, scale, out);
    case kEntries: return unpack_kind<kEntries>(body, arrays, first, tokens, scale, out);
  }
}

// The same multiplication afterwards, for groups of channels that are no whole chunks.
void scale_channels(const Body& body, int64_t tokens, const float* scale, float* out) {
  for (int64_t c = 0; c < body.channels; c++)
    for (int64_t t = 0; t < tokens; t++) out[t * body.padded() + position(c)] *= scale[c / body.group * kTile + t];
}

inline float one_float(const void* stored, int64_t type, int64_t at) {
  if (type == kvq::kFloat32) return static_cast<const float*>(stored)[at];
  const uint32_t bits = static_cast<const uint16_t*>(stored)[at];
  return type == kvq::kBfloat16 ? as_float(bits << 16) : from_half(Uints{} + bits)[0];
}

// `count` stored floats from index `at` on, in fp32, in their order.
void load_floats(const void* stored, int64_t type, int64_t at, int64_t count, float* out) {
  int64_t i = 0;
  if (type != kvq::kFloat32)
    for (; i + kLanes <= count; i += kLanes)
      store(out + i, load_halves(static_cast<const uint16_t*>(stored) + at + i, type == kvq::kBfloat16));
  for (; i < count; i++) out[i] = one_float(stored, type, at + i);
}

// The same, in the order of `position`.
void load_channels(const void* stored, int64_t type, int64_t at, int64_t count, float* out) {
  int64_t i = 0;
  if (type != kvq::kFloat32)
    for (; i + kWords <= count; i += kWords) {
      const Words x = load_words(static_cast<const uint16_t*>(stored) + at + i);
      for (int part = 0; part < kParts; part++)
        store(out + i + part * kLanes, type == kvq::kBfloat16 ? (Floats)part_of(x, part, true) : from_half(part_of(x, part, false)));
    }
  for (; i < count; i++) out[position(i)] = one_float(stored, type, at + i);
}

// Scales and zero points of every group of channels for the tile's tokens, [groups, kTile]; 0 for tokens from `live` on, whose stored
// values may be anything. The zero points are what is added to the product of scale and biased code.
void load_token_scales(const Body& body, const Arrays& arrays, int64_t capacity, int64_t first, int64_t live, float* scale, float* zero) {
  const int64_t groups = body.channels / body.group;
  const float offset = bias_of(body) + (body.stores_zero() ? 0.0f : float(body.centre));
  for (int64_t g = 0; g < groups; g++) {
    float *s = scale + g * kTile, *z = zero + g * kTile;
    load_floats(arrays.scale, body.scale_type, g * capacity + first, live, s);
    if (body.stores_zero()) load_floats(arrays.zero, body.scale_type, g * capacity + first, live, z);
    for (int64_t t = 0; t < live; t++) z[t] = (body.stores_zero() ? z[t] : 0.0f) - offset * s[t];
    for (int64_t t = live; t < kTile; t++) s[t] = z[t] = 0;
  }
}

// Scales and zero points of every channel, in the order of `position`, for the group of tokens number `group` or for all tokens; 0 for the
// padding. The zero points are what is added to the product of scale and biased code.
void load_channel_scales(const Body& body, const Arrays& arrays, int64_t group, float* scale, float* zero) {
  const int64_t at = body.affine == kvq::kTokenGroups ? group * body.channels : 0;
  const float offset = bias_of(body) + (body.stores_zero() ? 0.0f : float(body.centre));
  for (int64_t c = body.channels / kWords * kWords; c < body.padded(); c++) scale[c] = zero[c] = 0;
  load_channels(arrays.scale, body.scale_type, at, body.channels, scale);
  if (body.stores_zero()) load_channels(arrays.zero, body.scale_type, at, body.channels, zero);
  for (int64_t c = 0; c < body.padded(); c += kLanes) {
    const Floats s = load(scale + c);
    store(zero + c, (body.stores_zero() ? load(zero + c) : Floats{}) - s * offset);
  }
}

}  // namespace
