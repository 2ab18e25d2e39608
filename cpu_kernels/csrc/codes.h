// From the packed words of a cache to fp32 numbers in registers (codes, or the entries of a table),
// and to their scales and zero points.
#pragma once

#include "body.h"
#include "vectors.h"

namespace {

using kvq::Arrays;
using kvq::Body;
using kvq::kTile;

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

// In place of std::gcd, which translation units for different processors would share (vectors.h).
inline int64_t greatest_common_divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// `count` with padding to whole vectors.
inline int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Vectors of kLanes neighbouring channels of a token whose codes lie in the same words, each at a
// different shift. The bundles of a slot follow each other, and together hold every vector of
// channels once. (If the words of the first plane set are the same, so are the words of the second:
// it has fewer bits, so a whole number of its chunks shares the place of one of the first.)
constexpr int kBundle = 4;

struct Bundle {
  int32_t size;
  int32_t place[2];  // of the words in a row, of each plane set
  struct {
    int32_t vector;
    int32_t group;  // the place of its scale for a tile's first token, among [groups, kTile]
    int32_t shift[2];
  } fields[kBundle];
};

static_assert(sizeof(Bundle) == kvq::kBundleFloats * sizeof(float), "bundle_floats counts them");

// A float is 2^bits + code if the code is at the top of its mantissa, below the exponent of 2^bits.
constexpr int64_t kMantissa = 23;

inline float bias_of(const Body& body) { return body.table ? 0.0f : float(1 << body.bits); }

inline int64_t vectors_of(const Body& body) { return (body.channels + kLanes - 1) / kLanes; }

// Write the bundles of a slot, at most vectors_of(body). Return how many there are.
inline int64_t bundle(const Body& body, int64_t slot, Bundle* bundles) {
  int64_t count = 0;
  for (int64_t v = 0; v < vectors_of(body); v++) {
    const int64_t channel = v * kLanes;
    Bundle alone{1, {}, {{int32_t(v), int32_t(channel / body.group * kTile), {}}}};
    const int64_t number = slot * body.chunks + channel / body.width;
    int64_t top = kMantissa - body.bits;
    for (int64_t set = 0; set < body.sets(); set++) {
      const int64_t tiles = body.row_words(set) / body.width,
                    at = number / tiles * body.set_bits(set);
      alone.place[set] = int32_t(number % tiles * body.width + channel % body.width);
      // To the right for a table's index, else to the left. at + bits is at most 16.
      alone.fields[0].shift[set] = int32_t(body.table ? at : top - at);
      top += body.set_bits(set);
    }
    int64_t i = 0;
    while (i < count && (bundles[i].size == kBundle || bundles[i].place[0] != alone.place[0])) i++;
    if (i < count) bundles[i].fields[bundles[i].size++] = alone.fields[0];
    else bundles[count++] = alone;
  }
  return count;
}

// Tokens of one slot in successive rows of words. The first row is number `token` of a tile.
struct TokenRun {
  int64_t token, row, slot, count;
};

constexpr float kNoTable[16] = {};

// Turns words into numbers. The registers of a loop are set up once.
template <bool kTable, bool kTwo>
struct Codes {
  static constexpr bool kTwoSets = kTwo;
  Uints mask[2];
  Uints exponent;
  Shift apart;  // the place of the second plane set's codes in a table's index
  Table table;

  Codes(const Body& body, const Arrays& arrays) : table(kTable ? arrays.table : kNoTable) {
    const int64_t low = (1 << body.low_bits) - 1, high = (1 << (body.bits - body.low_bits)) - 1;
    mask[0] = Uints{} + uint32_t(kTable ? low : low << (kMantissa - body.bits));
    mask[1] = Uints{} + uint32_t(kTable ? high : high << (kMantissa - body.bits + body.low_bits));
    exponent = Uints{} + uint32_t((127 + body.bits) << kMantissa);
    apart = shift_by(int32_t(body.low_bits));
  }

  // The numbers in words of the first plane set and of the second.
  Floats at(Uints low, Uints high, Shift low_shift, Shift high_shift) const {
    if (kTable) {
      Uints code = (low >> low_shift) & mask[0];
      if (kTwoSets) code |= ((high >> high_shift) & mask[1]) << apart;
      return table.at(code);
    }
    Uints bits = masked_or(low << low_shift, mask[0], exponent);
    if (kTwoSets) bits = masked_or(high << high_shift, mask[1], bits);
    return (Floats)bits;
  }
};

// The number of an E8M0 code. 0, of an empty body, counts as 1: 2^-127 is subnormal.
inline float from_e8m0(uint8_t code) { return as_float(uint32_t(code ? code : 1) << kMantissa); }

inline float one_float(const void* stored, int64_t type, int64_t at) {
  if (type == kvq::kFloat32) return static_cast<const float*>(stored)[at];
  return load_half(static_cast<const uint16_t*>(stored) + at, type == kvq::kBfloat16);
}

// Write `count` stored floats from index `at` on to `out`, as fp32.
void load_floats(const void* stored, int64_t type, int64_t at, int64_t count, float* out) {
  if (type == kvq::kFloat32) {
    std::memcpy(out, static_cast<const float*>(stored) + at, sizeof(float) * count);
    return;
  }
  if (type == kvq::kE8M0 || type == kvq::kE4M3) {
    const uint8_t* codes = static_cast<const uint8_t*>(stored) + at;
    for (int64_t i = 0; i < count; i++)
      out[i] = type == kvq::kE8M0 ? from_e8m0(codes[i])
                                  : from_e4m3(Uints{} + (uint32_t(codes[i]) << 24))[0];
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(out + i,
          load_halves(static_cast<const uint16_t*>(stored) + at + i, type == kvq::kBfloat16));
  for (; i < count; i++) out[i] = one_float(stored, type, at + i);
}

// Return the offset of codes as numbers: their bias, plus the code that stands for 0 if no zero
// point is stored.
inline float offset_of(const Body& body) {
  return bias_of(body) + (body.stores_zero() ? 0.0f : float(body.centre));
}

// Write what is added to the product of scale and biased code: zero - scale * (bias + centre), for
// `count` scales, a multiple of kLanes.
void shift_zeros(const Body& body, int64_t count, const float* scale, float* zero) {
  const float offset = offset_of(body);
  for (int64_t i = 0; i < count; i += kLanes)
    store(zero + i, (body.stores_zero() ? load(zero + i) : Floats{}) - load(scale + i) * offset);
}

// Read the scales and zero points of every group of channels for the tile's tokens, [groups,
// kTile]. They are 0 for tokens from `live` on, whose stored values may be anything.
void load_token_scales(const Body& body, const Arrays& arrays, int64_t capacity, int64_t first,
                       int64_t live, float* scale, float* zero) {
  const int64_t groups = body.channels / body.group, padded = whole_vectors(live);
  for (int64_t g = 0; g < groups; g++) {
    float *s = scale + g * kTile, *z = zero + g * kTile;
    load_floats(arrays.scale, body.scale_type, g * capacity + first, live, s);
    if (body.stores_zero())
      load_floats(arrays.zero, body.scale_type, g * capacity + first, live, z);
    for (int64_t t = live; t < padded; t++) s[t] = z[t] = 0;
    shift_zeros(body, padded, s, z);
  }
}

// Put values[g * kTile] of each group g at the group's channels, and 0 at padding.
inline void spread_groups(const Body& body, const float* values, float* out) {
  for (int64_t first = 0; first < body.channels; first += body.group, values += kTile)
    for (int64_t c = first; c < first + body.group; c += kLanes) {
      // what is too much is replaced by the next group
      if (c + kLanes <= body.padded()) store(out + c, splat(*values));
      else
        for (int64_t i = c; i < body.padded(); i++) out[i] = *values;
    }
  for (int64_t c = body.channels; c < body.padded(); c++) out[c] = 0;
}

// Read the stored scales and zero points (0 if none is stored) of every channel, for group number
// `group` of tokens or for all tokens. They are 0 for padding.
void load_stored_scales(const Body& body, const Arrays& arrays, int64_t group, float* scale,
                        float* zero) {
  const int64_t at = body.affine == kvq::kTokenGroups ? group * body.channels : 0,
                padded = vectors_of(body) * kLanes;
  for (int64_t c = body.stores_zero() ? body.channels : 0; c < padded; c++) zero[c] = 0;
  for (int64_t c = body.channels; c < padded; c++) scale[c] = 0;
  load_floats(arrays.scale, body.scale_type, at, body.channels, scale);
  if (body.stores_zero()) load_floats(arrays.zero, body.scale_type, at, body.channels, zero);
}

// The same, with zero points shifted as needed by products with biased codes.
void load_channel_scales(const Body& body, const Arrays& arrays, int64_t group, float* scale,
                         float* zero) {
  load_stored_scales(body, arrays, group, scale, zero);
  shift_zeros(body, vectors_of(body) * kLanes, scale, zero);
}

}  // namespace
