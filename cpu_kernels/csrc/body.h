// The description of the keys, or the values, of a cache's body. Plain data, shared by all
// translation units.
//
//   vector[t, c] = entry(code[t, c]) * scale + zero      entry: the code, or its entry in a table
//
// or rows in full precision, or keys in polar form, k_i = r cos(theta), k_{i+H/2} = r sin(theta),
// from two codes in one. Sparse residuals may be added to the vectors, and keys may have been
// stored before RoPE.
//
// The layout of the words is described in pallas_kernels/tiles/layout.py: a chunk is W neighbouring
// channels of a token, field i of tile j of a row of words holds chunk number i * m + j
// (slot-major), and the slots of a row are tokens P/n apart in a span of P tokens.
#pragma once

#include <cstdint>

// Functions that translation units for different processors share must be inlined: a linker would
// keep one copy, compiled for any of them.
#define KVQ_INLINE inline __attribute__((always_inline))

namespace kvq {

enum Affine : int64_t {
  kTokenGroups = 0,    // scale, zero point [S / group, H]: groups of tokens, each channel its own
  kChannelGroups = 1,  // [H / group, S]: groups of channels, each token its own
  kChannels = 2,       // [H]: each channel its own, the same for all tokens
};

enum Form : int64_t {
  kCodes = 0,
  kRows = 1,  // [S, H] in full precision; affine and the layout of words are unused
  // Codes of H / 2 pairs, radius << angle_bits | angle. Steps and least values of both lie in
  // [S / group, H / 2].
  kPolar = 2,
  kRuns = 3,    // runs of channels of one width each (runs.h); affine is unused
  kFloats = 4,  // E4M3 numbers of 8 bits, without scales
};

constexpr int64_t kMaxChannels = 1024;
constexpr int64_t kMaxPadded = kMaxChannels + 512;
constexpr int64_t kRunWidths = 8;  // 1 to 8 bits

// The last two, for scales, are exponents of two with a bias of 127, and floats of 8 bits.
enum Stored : int64_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kE8M0 = 3, kE4M3 = 4 };

struct Body {
  int64_t bits;           // of a code, all plane sets together
  int64_t low_bits;       // of the first plane set
  int64_t channels;       // H, or the H / 2 pairs of polar keys
  int64_t chunks;         // of a token, padding included
  int64_t width;          // W
  int64_t slots;          // n, tokens that share a row of words
  int64_t span;           // P, tokens over which the slots are spread
  int64_t affine;         // Affine
  int64_t group;          // elements that share a scale
  int64_t heads;          // neighbouring heads that share a scale
  int64_t scale_type;     // Stored, also of rows in full precision
  int64_t centre;         // the code (or entry) that is 0 if no zero point is stored, else -1
  int64_t table;          // 1 if codes index a table of 2^bits entries
  int64_t form;           // Form
  int64_t pool;           // tokens that share slots for outliers, else 0
  int64_t rotated;        // 1 for keys before RoPE
  int64_t angle_bits;     // of a polar code
  int64_t residual_type;  // Stored: of outliers
  int64_t root;           // 1 if polar radii are the squares of the stored numbers
  int64_t synthesis;      // 1 for keys in runs that a matrix makes of their channels
  int64_t run_channels[kRunWidths];  // stored with 1, 2, ... bits

  KVQ_INLINE int64_t sets() const { return low_bits == bits ? 1 : 2; }
  KVQ_INLINE int64_t set_bits(int64_t set) const { return set == 0 ? low_bits : bits - low_bits; }
  KVQ_INLINE int64_t padded() const { return chunks * width; }  // channels of a token with padding
  // Words of a row.
  KVQ_INLINE int64_t row_words(int64_t set) const { return slots * padded() * set_bits(set) / 16; }
  KVQ_INLINE bool stores_zero() const { return centre < 0; }
  KVQ_INLINE int64_t head_dim() const { return form == kPolar ? 2 * channels : channels; }
  // Numbers of a vector with padding.
  KVQ_INLINE int64_t row_floats() const {
    return form == kPolar ? (2 * channels + 15) / 16 * 16 : padded();
  }
  KVQ_INLINE int64_t channel_groups() const {
    return affine == kChannelGroups ? channels / group : 0;
  }
  // True if each vector of so many channels has one scale. Padding counts to a single group: it
  // meets zeros of queries, and its sums are not looked at.
  KVQ_INLINE bool whole_groups(int64_t lanes) const {
    return group % lanes == 0 || channel_groups() == 1;
  }
  KVQ_INLINE int64_t stored_channels() const {
    int64_t sum = 0;
    for (int64_t channels : run_channels) sum += channels;
    return sum;
  }
  // True if vectors are made one by one, instead of being multiplied as they are unpacked.
  KVQ_INLINE bool decoded() const { return form != kCodes || pool || rotated; }
};

constexpr int64_t kBodyFields = sizeof(Body) / sizeof(int64_t);

// Residuals of the entries that codes do not hold, in pools of tokens whose heads share slots. The
// slots of a head are sorted by token and channel, `ends` is the first slot behind each head's, and
// index is token * H + channel, with the token counted from the pool's first.
struct Outliers {
  const uint16_t* index;  // [S / pool, slots]
  const void* residual;   // [S / pool, slots]
  const uint16_t* ends;   // [S / pool, heads]
  int64_t slots, heads, head;
};

// Cosines and sines of RoPE for H / 2 pairs.
struct Turns {
  const float* steps;  // [2, kDecoded, H / 2]: of 0, 1, ... tokens, times the attention factor
  const float* near;   // [2, near_count, H / 2]: of 0, 1, ... times kDecoded tokens
  const float* far;    // [2, far_count, H / 2]: of body tokens 0, kNear * kDecoded, ...
  int64_t near_count, far_count;
};

// The plane sets of codes of `width` bits, the widest first, and the tokens that share a row of
// words of such a run.
KVQ_INLINE int64_t run_set_bits(int64_t width, int64_t set) {
  for (; set > 0; set--) width -= int64_t(1) << (63 - __builtin_clzll(width));
  return int64_t(1) << (63 - __builtin_clzll(width));
}
KVQ_INLINE int64_t run_slots(int64_t width) { return 16 / (width & -width); }

// A body in runs: the words of each run, for each plane set [S / slots, slots * channels * bits /
// 16], and its calibration.
struct RunArrays {
  const uint16_t* words[kRunWidths][3];
  const int8_t* exponent;  // [S]: of a token's scale, in eighths
  const float* steps;      // [kRunWidths]: of codes of 1, 2, ... bits
  // Keys [H]: the place of a channel among the stored ones, with pairs side by side.
  const int32_t* place;
  const float* scale;  // keys [H]
  // Values, and keys with Body::synthesis [H, H]; the stored channels have the first rows. Such
  // keys have no place and no scale.
  const float* synthesis;
  const float* mean;  // [H]
};

// The arrays of one row of the batch and one KV head.
struct Arrays {
  const uint16_t* words[2];
  const void* scale;  // or the rows in full precision, or the steps of radii
  const void* zero;   // or the least radii
  const void* angle_scale;
  const void* angle_zero;
  const float* table;
  Outliers outliers;
  Turns turns;
  RunArrays runs;
};

// The windows of a cache, tokens in full precision, for one row of the batch and one KV head. There
// are two, of `tokens` rows each.
struct Windows {
  const void* keys[2];    // [tokens, H]
  const void* values[2];  // [tokens, H]
  int64_t tokens[2];
  int64_t type;           // Stored
  const uint8_t* seen;    // [both windows' tokens]: nonzero if the rows see the token
  const float* turns[2];  // [both windows' tokens, H / 2]: cosines and sines, for keys before RoPE
};

// Attention of the query rows of one KV head over the body tokens first .. last - 1, or over the
// windows.
struct Work {
  const Body* k;
  const Body* v;
  Arrays keys;
  Arrays values;
  const Windows* windows;  // null for the body
  const float* q;          // [rows, H], not scaled
  const int32_t* lower;    // [queries]: row i sees no token below lower[i % queries], null for none
  const int32_t* limits;   // [queries]: row i sees the tokens below limits[i % queries]
  int64_t rows;
  int64_t queries;
  int64_t capacity;  // S
  int64_t first;
  int64_t last;
  int64_t offset;  // of the numbers of tokens in `lower` and `limits` to their places in the arrays
  float scale;     // of scores
  float soft_cap;  // c tanh(score / c), or 0 for none
  float* scratch;  // scratch_floats(*k, *v, rows), aligned to 64 bytes
  bool ordered;    // the scratch still holds the matrix of these keys, as earlier work left it
  float* m;        // [rows]: the largest score
  float* l;        // [rows]: the sum of exp(score - m)
  float* o;        // [rows, H]: the sum of exp(score - m) * value
};

constexpr int64_t kTile = 128;     // tokens whose scores become weights together
constexpr int64_t kDecoded = 32;   // tokens whose vectors are made together
constexpr int64_t kRowBlock = 4;   // query rows that share the numbers made from a word
constexpr float kNegInf = -1e30f;  // finite, as in partial_attention.py

// Runs of kDecoded tokens whose positions are counted from the same one, so RoPE's tables stay
// short.
constexpr int64_t kNear = 256;

KVQ_INLINE int64_t row_blocks(int64_t rows) { return (rows + kRowBlock - 1) / kRowBlock; }

constexpr int64_t kBundleFloats = 19;

// Bundles (codes.h), one for at most 4 channels, and one more number for each slot.
KVQ_INLINE int64_t bundle_floats(const Body& body) {
  return body.slots * (body.padded() / 4 * kBundleFloats + 1);
}

// Transposed words of a span, for up to 16 lanes, and the places of each vector's codes
// (transposed.h).
KVQ_INLINE int64_t transposed_floats(const Body& body) {
  if (body.decoded()) return 0;
  const int64_t rows = body.span / body.slots, vectors = body.padded() / 4;
  return (rows < 16 ? 16 : rows) * (body.row_words(0) + body.row_words(1)) +
         2 * vectors * body.span + 2 * vectors;
}

constexpr int64_t kMaxLanes = 16;  // lanes of the longest vector

// Vectors of kDecoded tokens, and their cosines and sines, in the order of storage, and a few more
// rows; or a row of 16-bit pairs for every two stored channels (runs.h).
KVQ_INLINE int64_t run_floats(const Body& body) {
  if (body.form != kRuns) return 0;
  const int64_t rows = (body.rotated ? 3 : 1) * kDecoded + 3,
                pairs = body.synthesis ? (body.stored_channels() + 1) / 2 : 0;
  return (rows + pairs) * (body.row_floats() + kMaxLanes);
}

// Transposed words of the runs of a tile, at most 32 lanes for each group of kDecoded tokens, and
// tables in the order of storage (runs_across.h).
KVQ_INLINE int64_t across_floats(const Body& body) {
  int64_t words = 0;
  for (int64_t width = 1; width <= kRunWidths; width++)
    for (int64_t set = 0; set < __builtin_popcountll(width); set++)
      words += body.run_channels[width - 1];
  return words * kTile + (body.rotated ? 3 + 2 * kDecoded : 0) * (words ? body.channels : 0);
}

// Arrays that AttentionState takes from its scratch, at most. Up to 15 floats are lost before each,
// because it begins at a multiple of 64 bytes.
constexpr int64_t kMaxTakes = 29;

KVQ_INLINE int64_t scratch_floats(const Body& k, const Body& v, int64_t rows) {
  const int64_t padded = row_blocks(rows) * kRowBlock,
                widest = k.row_floats() > v.row_floats() ? k.row_floats() : v.row_floats();
  const int64_t k_groups = k.channel_groups() + 1, v_groups = v.channel_groups() + 1,
                groups = k_groups > v_groups ? k_groups : v_groups;
  const int64_t lanes = kMaxLanes;
  return (padded + v_groups * kRowBlock) * (kTile + lanes)  // scores or weights, and scaled weights
         + (padded + kRowBlock) * k.row_floats()            // queries, and scaled or turned queries
         + padded * (v.row_floats() + lanes)                // weighted values, sums of weights
         + padded * (k_groups + lanes * v_groups)           // sums of queries, weighted zero points
         + padded * (1 + lanes)                             // maxima, biases
         + 2 * kTile * groups                               // scales and zero points of tokens
         + kTile * widest                                   // scales of elements, or vectors
         + 4 * (widest + lanes)                 // scales and zero points of channels, and of angles
         + bundle_floats(k) + bundle_floats(v)  // places of codes
         + transposed_floats(k)                 // words
         + run_floats(k) + run_floats(v)        // vectors of runs
         + across_floats(k) + across_floats(v)  // or their words
         + 16 * kMaxTakes;                      // alignment
}

using AttendTokens = void (*)(const Work&);

}  // namespace kvq
