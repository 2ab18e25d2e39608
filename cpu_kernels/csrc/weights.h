// A matrix of weights that stays packed, and the product of some of its outputs with rows of
// activations. Plain data, shared by all translation units.
//
//   w[i, o] = (code[i, o] - centre) scale[i / group, o] + min[i / group, o]        y = x w
//
// Outputs lie in panels of kPanelOutputs, which are the lanes of vectors. A scale is a float16, or
// the product of a signed byte and a float16 that kCoarse inputs share; minima likewise.
#pragma once

#include <cstdint>

#include "body.h"

namespace kvq {

constexpr int64_t kPanelOutputs = 32;
constexpr int64_t kWordInputs = 32;  // inputs whose 4-bit codes lie in four words of an output
constexpr int64_t kCoarse = 256;
constexpr int64_t kTokenBlock = 8;  // rows of x that lie interleaved

struct Scales {
  const void* fine = nullptr;  // [P, I / group, 32]: float16, or int8 if there are coarse ones
  const uint16_t* coarse = nullptr;  // [P, I / kCoarse, 32], or null
};

// Words of 4-bit codes are a GGUF file's: byte b of word w of a run of kWordInputs holds input
// 4 w + b in its low bits, and input 16 + 4 w + b in its high ones.
struct PackedMatrix {
  int64_t bits;   // 4 or 8
  int64_t group;  // 16 or 32, and 32 for 4 bits
  int64_t inputs, outputs;
  float centre;       // 0 for 8 bits
  const void* codes;  // 4 bits: uint32 [P, I / 8, 32]; 8 bits: int8 [P, I, 32]
  Scales scales, mins;

  int64_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

// The rows of x in blocks of kTokenBlock. Row t of a block of n rows has input i at x[i * n + t].
// n is 1, 2, 4 or 8. The rows beyond the last are 0.
struct TokenBlock {
  const float* x;     // [I, n]
  const float* sums;  // [I / group, n]: of x over each group. Null without minima
  int64_t width;      // n
  int64_t count;      // rows that there are
  float* y;           // [count, outputs]
};

struct PanelProduct {
  const PackedMatrix* weights;
  const TokenBlock* blocks;
  int64_t first_panel, last_panel, first_block, last_block;
};

using MultiplyPanels = void (*)(const PanelProduct&);

}  // namespace kvq
