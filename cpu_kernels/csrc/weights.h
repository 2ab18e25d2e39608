// A matrix of weights that stays packed, and the product of some of its outputs with rows of
// activations. Plain data, shared by all translation units.
//
//   w[i, o] = (code[i, o] - centre) scale[i / group, o] + min[i / group, o]        y = x w
//
// Outputs lie in panels of kPanelOutputs, which are the lanes of vectors. A scale is a number of 16
// or 32 bits, or the product of a signed byte and a float16 that kCoarse inputs share; minima
// likewise, or the product of a signed byte and the scale. A scale of MXFP4 is a power of two, and
// its codes are numbers of 4 bits. Codes of 4 bits may stand for 16 levels (NF4), and codes of FP8
// are numbers of 8 bits. Numbers of 16 bits have no scales.
//
// Codes of 4 bits may also stand for levels of their output, all but some sparse ones (Tables):
//
//   w[i, o] = value of the sparse entry (o, i), or levels[o, code[i, o]]
//
// Such codes lie by output and not in panels, and the lanes of vectors are inputs.
#pragma once

#include <cstdint>

#include "body.h"

namespace kvq {

constexpr int64_t kPanelOutputs = 32;
constexpr int64_t kWordInputs = 32;  // inputs whose 4-bit codes lie in four words of an output
constexpr int64_t kCoarse = 256;
constexpr int64_t kTokenBlock = 8;  // rows of x that lie interleaved
constexpr int64_t kMaxDigits = 3;

enum class ScaleKind {
  kFloat16,
  kBfloat16,
  kFloat32,
  kOfCoarse,   // int8 factors of coarse scales
  kOfScale,    // int8 factors of the scale; minima alone
  kExponents,  // uint8 e of MXFP4, for 2^(e - 128)
};

struct Scales {
  const void* fine = nullptr;        // [P, I / group, 32]
  const uint16_t* coarse = nullptr;  // float16 [P, I / kCoarse, 32] if the kind is kOfCoarse
  ScaleKind kind = ScaleKind::kFloat16;

  int64_t bytes() const {  // of an entry of `fine`
    if (kind == ScaleKind::kFloat32) return 4;
    return kind == ScaleKind::kFloat16 || kind == ScaleKind::kBfloat16 ? 2 : 1;
  }
};

constexpr int64_t kLaneWords = 16;            // words that lie beside each other in `by_word`
constexpr int64_t kLaneRun = kLaneWords * 8;  // their inputs

// The levels of each output, and the entries that are stored as they are, by output and input. The
// code of such an entry is 0.
struct Tables {
  const void* levels = nullptr;          // [O, 16]
  const int32_t* starts = nullptr;       // [O + 1], of the entries of each output
  const uint16_t* inputs = nullptr;      // [starts[O]]
  const void* values = nullptr;          // [starts[O]]
  ScaleKind kind = ScaleKind::kFloat32;  // of levels and values: 16 or 32 bits
};

// Words of 4-bit codes are a GGUF file's: byte b of word w of a run of kWordInputs holds input
// 4 w + b in its low bits, and input 16 + 4 w + b in its high ones. Codes of 8 bits lie by fours.
// With tables, bits 4 j of word w of an output are those of input 8 w + j.
struct PackedMatrix {
  int64_t bits;   // 4, 8 or 16
  int64_t group;  // 16 or 32, and 16 for 8 bits alone
  int64_t inputs, outputs;
  float centre;  // 0 but for 4 bits
  // 4 bits: uint32 [P, I / 8, 32], or [O, I / 8] with tables. 8 bits: int8 or E4M3
  // [P, I / 4, 32, 4]. 16 bits: bfloat16 or float16 [P, I, 32].
  const void* codes;
  Scales scales, mins;
  bool bfloat16 = false;          // of 16 bits
  bool e4m3 = false;              // of 8 bits
  const float* levels = nullptr;  // [16], what codes of 4 bits stand for, or null for integers
  Tables tables{};                // of 4 bits

  // Twice a number of 4 bits (E2M1) is an integer from -12 to 12.
  bool e2m1() const { return scales.kind == ScaleKind::kExponents; }
  bool has_tables() const { return tables.levels != nullptr; }
  bool integers() const { return bits < 16 && !e4m3 && !levels && !has_tables(); }
  int64_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

// Rows of x in blocks of kTokenBlock. Row t of a block of n rows has input i at x[i * n + t]. n is
// 1, 2, 4 or 8. The rows beyond the last are 0.
//
// Kernels of integers read digits instead. With k digits to the base of 256,
//
//   x[i] = scale[group of i] (256^(k - 1) digit_0 + .. + digit_(k - 1))
//
// the digit that counts most is the first. Its group's largest entry decides the scale.
struct TokenBlock {
  const float* x;         // [I, n], or null
  const float* by_word;   // [runs of kLaneRun, 8, n, kLaneWords]: x of entry j of each word. Zeros
                          // lie behind the last input. Null without tables
  const float* sums;      // [I / group, n]: of x over each group. Null without minima or a centre
  const int32_t* digits;  // [I / 4, n, k]: int8 digits of four inputs, or null
  const float* scales;    // [I / group, n]
  const int32_t* starts;  // [I / group, n, 2]: of sums of products with all digits but the last,
                          // and with the last, so that codes can be counted from 0
  int64_t width;          // n
  const int64_t* rows;    // [count], which rows of x and y they are
  int64_t count;          // rows that there are
};

struct PanelProduct {
  const PackedMatrix* weights;
  const TokenBlock* blocks;
  float* y;  // [T, outputs]
  int64_t first_panel, last_panel, first_block, last_block;
  int64_t digits;  // of a kernel of integers
};

// The rows that become a block of digits, and what is made of them.
struct DigitRows {
  const float* x;         // [T, I]
  const int64_t* chosen;  // [count], the rows of x
  int64_t inputs, group, width, count;
  int32_t offset;  // what is added to codes to count them from 0
  int32_t* digits;
  float* scales;
  int32_t* starts;
  float* sums;  // null without minima
};

// A kernel for a processor: of floats, and of digits if bytes are multiplied faster. Weights of 16
// bits meet floats in every kernel.
struct Multiplier {
  void (*panels)(const PanelProduct&);
  // True if a matrix meets rows of so many digits. Null for a kernel of floats alone.
  bool (*reads_digits)(const PackedMatrix&, int64_t digits) = nullptr;
  void (*to_digits)(const DigitRows&, int64_t digits) = nullptr;
};

}  // namespace kvq
