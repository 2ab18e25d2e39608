// One call of decode attention: its work is cut into tasks over stretches of the live length,
// which any threads run, and merged exactly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "body.h"
#include "tasks.h"

namespace kvq {

// Tokens of a task, a multiple of kTile. It is constant, so results do not depend on the number of
// threads.
constexpr int64_t kTaskTokens = 1024;

// Arrays of a whole batch: `row` and `head` are the bytes from one row of the batch, and from one
// head (or group of heads), to the next.
struct Strided {
  const char* data = nullptr;
  int64_t row = 0;
  int64_t head = 0;

  const void* at(int64_t b, int64_t k, int64_t heads) const {
    return data ? data + b * row + k / heads * head : nullptr;
  }
};

// The outliers of a whole batch. `head` is 0, because all heads share them.
struct SparseSide {
  Strided index;
  Strided residual;
  Strided ends;
  int64_t slots = 0, heads = 0;
};

// Runs of a whole batch (RunArrays of body.h).
struct RunSide {
  Strided words[kRunWidths][3];
  Strided exponent;
  Strided place, scale, synthesis, mean;  // the same for all rows of the batch
  const float* steps = nullptr;
};

struct Side {
  Body body;
  Strided words[2];
  Strided scale;
  Strided zero;
  Strided angle_scale;
  Strided angle_zero;
  const float* table = nullptr;  // padded to 16 entries
  SparseSide outliers;
  Turns turns{};
  RunSide runs;
};

// The windows of a whole batch (Windows of body.h), and the queries that read them.
struct ExactSide {
  const float* q = nullptr;  // [B, K, R, H], or null if the call has no windows
  Strided keys[2];
  Strided values[2];
  int64_t tokens[2] = {0, 0};
  int64_t type = kFloat32;
  const uint8_t* seen = nullptr;  // [B, both windows' tokens]
  const float* turns[2] = {};     // [B, both windows' tokens, H / 2]
};

// A body whose newer tokens take the places of older ones: token t lies at place t % tokens.
struct Ring {
  int64_t tokens = 0;                // 0 if the body is not a ring
  const int32_t* written = nullptr;  // [B]: tokens that were written so far
  // [B, K, R, H]: queries for keys before RoPE that lie before the last whole round. The others
  // are read by `Call::q`, and places count as positions.
  const float* q_before = nullptr;
};

struct Call {
  Side keys;
  Side values;
  ExactSide windows;
  Ring ring;
  const float* q;                  // [B, K, R, H]
  const int32_t* limits;           // [B, T]
  const int32_t* lower = nullptr;  // [B, T], or null if all tokens below the limits are seen
  float scale = 1, soft_cap = 0;   // Work of body.h
  int64_t batch, heads, rows, queries, capacity;
  float* m;  // [B, K, R]
  float* l;  // [B, K, R]
  float* o;  // [B, K, R, H]
};

// Fill m, l and o. `helpers` is how many threads `schedule` may use besides this one.
void attend(const Call& call, AttendTokens kernel, int64_t helpers, const Schedule& schedule);

}  // namespace kvq
