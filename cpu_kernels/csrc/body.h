// What a kernel is told of the keys, or the values, of a cache's body. Plain data, shared by all translation units.
//
//   vector[t, c] = entry(code[t, c]) * scale + zero        entry: the code itself, or that of a table
//
// The layout of the words is that of pallas_kernels/tiles/layout.py: a chunk is W neighbouring channels of a token, field i of tile j of a
// row of words holds chunk number i * m + j (slot-major), and the slots of a row are tokens P/n apart in a span of P tokens.
#pragma once

#include <cstdint>

// Functions that translation units for different processors share must be inlined: a linker would keep one copy, compiled for any of them.
#define KVQ_INLINE inline __attribute__((always_inline))

namespace kvq {

enum Affine : int64_t {
  kTokenGroups = 0,    // scale and zero point [S / group, H]: groups of tokens, each channel has its own
  kChannelGroups = 1,  // [H / group, S]: groups of channels, each token has its own
  kChannels = 2,       // [H]: each channel has its own, the same for all tokens
};

enum Stored : int64_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

struct Body {
  int64_t bits;        // of a code, all plane sets together
  int64_t low_bits;    // of the first plane set
  int64_t channels;    // H
  int64_t chunks;      // of a token, padding included
  int64_t width;       // W
  int64_t slots;       // n, tokens that share a row of words
  int64_t span;        // P, tokens over which the slots are spread
  int64_t affine;      // Affine
  int64_t group;       // elements that share a scale
  int64_t heads;       // neighbouring heads that share a scale
  int64_t scale_type;  // Stored
  int64_t centre;      // the code that stands for 0 where no zero point is stored, else -1
  int64_t table;       // 1 where codes index a table of 2^bits entries

  KVQ_INLINE int64_t sets() const { return low_bits == bits ? 1 : 2; }
  KVQ_INLINE int64_t set_bits(int64_t set) const { return set == 0 ? low_bits : bits - low_bits; }
  KVQ_INLINE int64_t padded() const { return chunks * width; }                                    // channels of a token with padding
  KVQ_INLINE int64_t row_words(int64_t set) const { return slots * padded() * set_bits(set) / 16; }  // words of a row
  KVQ_INLINE bool stores_zero() const { return centre < 0; }
};

constexpr int64_t kBodyFields = sizeof(Body) / sizeof(int64_t);

// The arrays of one row of the batch and one KV head.
struct Arrays {
  const uint16_t* words[2];
  const void* scale;
  const void* zero;
  const float* table;
};

// The windows of a cache, tokens in full precision, for one row of the batch and one KV head: two of them, of `tokens` rows each.
struct Windows {
  const void* keys[2];    // [tokens, H]
  const void* values[2];  // [tokens, H]
  int64_t tokens[2];
  int64_t type;           // Stored
  const uint8_t* seen;    // [both windows' tokens]: whether the rows see a token
};

// Attention of the query rows of one KV head over the body tokens first .. last - 1, or over the windows.
struct Span {
  const Body* k;
  const Body* v;
  Arrays keys;
  Arrays values;
  const Windows* windows;  // null for the body
  const float* q;         // [rows, H], not scaled
  const int32_t* limits;  // [queries]: row i sees the tokens below limits[i % queries]
  int64_t rows;
  int64_t queries;
  int64_t capacity;  // S
  int64_t first;     // a multiple of kTile
  int64_t last;      // at most the largest limit
  float* scratch;    // scratch_floats(*k, *v, rows), aligned to 64 bytes
  float* m;          // [rows]: the largest score
  float* l;          // [rows]: the sum of exp(score - m)
  float* o;          // [rows, H]: the sum of exp(score - m) * value
};

constexpr int64_t kTile = 128;      // tokens whose scores become weights together
constexpr int64_t kRowBlock = 4;    // query rows that share the numbers made of a word
constexpr float kNegInf = -1e30f;   // finite, as in partial_attention.py

KVQ_INLINE int64_t row_blocks(int64_t rows) { return (rows + kRowBlock - 1) / kRowBlock; }

// Bundles (codes.h) of 15 numbers, one for 4 channels at most, and one number more for each slot.
KVQ_INLINE int64_t bundle_floats(const Body& body) { return body.slots * (body.padded() / 4 * 15 + 1); }

KVQ_INLINE int64_t scratch_floats(const Body& k, const Body& v, int64_t rows) {
  const int64_t padded = row_blocks(rows) * kRowBlock, widest = k.padded() > v.padded() ? k.padded() : v.padded();
  const int64_t k_groups = k.channels / k.group + 1, v_groups = v.channels / v.group + 1, groups = k_groups > v_groups ? k_groups : v_groups;
  const int64_t lanes = 16;                          // of the widest vector
  return (padded + v_groups * kRowBlock) * (kTile + lanes)  // scores or weights, and scaled weights
         + (padded + kRowBlock) * k.padded()         // queries, and scaled queries
         + padded * (v.padded() + lanes)             // weighted values, sums of weights
         + padded * (k_groups + lanes * v_groups + 2)  // sums of queries, weighted zero points, maxima, biases
         + 2 * kTile * groups + kTile * widest       // scales and zero points of tokens; scales of each element
         + 2 * widest                                // scales and zero points of channels
         + bundle_floats(k) + bundle_floats(v)       // where codes are
         + 16 * 20;                                  // alignment
}

using AttendSpan = void (*)(const Span&);

void attend_span_baseline(const Span&);
void attend_span_avx2(const Span&);
void attend_span_avx512(const Span&);

}  // namespace kvq
