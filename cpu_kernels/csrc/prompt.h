// Exact attention of many query tokens over rows in full precision: older ones, which the first few
// queries see, and the new ones, of which a query sees a run. Plain data, shared by all translation
// units.
#pragma once

#include <cstdint>

#include "body.h"

namespace kvq {

constexpr int64_t kKeyBlock = 256;  // keys whose scores become weights together
constexpr int64_t kRowTile = 6;     // query rows that share the loads of a key or value
constexpr int64_t kMaxRows = 384;   // query rows of a task, which share the packing of keys
constexpr int64_t kMinRows = 96;

// Some query tokens of the heads that read one KV head of one row of the batch. Row i of them is
// token i / group of head i % group.
struct PromptRows {
  const float* q;         // [group, T, H], not scaled
  const void* keys;       // [old + fresh, H]
  const void* values;     // [old + fresh, H]
  const int32_t* seen;    // [seen_count]: the older rows that queries see, the first left first
  const int32_t* left;    // [T]: how many of them, from the first on, a query no longer sees
  const int32_t* begins;  // [T]: the first new row that a query sees, never one before the last
  const int32_t* counts;  // [T]: the row behind the last one, likewise
  int64_t type;           // Stored: of keys and values
  int64_t group, queries, channels, old, seen_count;
  int64_t first, last;  // query tokens
  float scale;
  float soft_cap;  // c tanh(score / c), or 0 for none
  float* scratch;  // prompt_scratch(rows, channels), aligned to 64 bytes
  float* m;        // [group, T]: the largest score
  float* l;        // [group, T]: the sum of exp(score - m)
  float* o;        // [group, T, H]: the sum of exp(score - m) * value
};

KVQ_INLINE int64_t whole_tiles(int64_t rows) { return (rows + kRowTile - 1) / kRowTile * kRowTile; }

// Channels with padding, in whole vectors of any processor.
KVQ_INLINE int64_t padded_channels(int64_t channels) {
  return (channels + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
}

// Arrays that PromptAttention takes from its scratch, at most (kMaxTakes of body.h).
constexpr int64_t kMaxPromptTakes = 8;

KVQ_INLINE int64_t prompt_scratch(int64_t rows, int64_t channels) {
  const int64_t width = padded_channels(channels);
  return 2 * whole_tiles(rows) * (width + 8)  // queries, weighted values, maxima and sums
         + 2 * kKeyBlock * width              // a block of keys and of values
         + kRowTile * kKeyBlock               // scores
         + 16 * kMaxPromptTakes;              // alignment
}

using AttendRows = void (*)(const PromptRows&);

}  // namespace kvq
