// The scales and minima of a panel of packed weights, and where its products go.
#pragma once

#include <algorithm>

#include "vectors.h"
#include "weights.h"

namespace {

using kvq::DigitRows;
using kvq::kPanelOutputs;
using kvq::PackedMatrix;
using kvq::PanelProduct;
using kvq::TokenBlock;

constexpr int64_t kAhead = 2048;  // bytes that are fetched before they are needed

inline Floats load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  __m128i x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Floats);
#endif
}

// 2^(e - 128) for each byte e.
inline Floats load_exponents(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes x;
  std::memcpy(&x, p, sizeof x);
  const Uints e = __builtin_convertvector(x, Uints);
  const Floats subnormal =
      choose((Ints)(e == 0), (Floats)(Uints{} + (1u << 21)), (Floats)(Uints{} + (1u << 22)));
  return choose((Ints)(e < 2), subnormal, (Floats)((e - 1) << 23));
}

// Twice each number of 4 bits (E2M1).
constexpr float kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Scales of group g of all groups of a panel, from a lane on.
inline Floats scales_at(const kvq::Scales& scales, int64_t panel, int64_t groups, int64_t g,
                        int64_t group, int64_t lane) {
  using kvq::ScaleKind;
  const int64_t at = (panel * groups + g) * kPanelOutputs + lane;
  if (scales.kind == ScaleKind::kExponents)
    return load_exponents(static_cast<const uint8_t*>(scales.fine) + at);
  if (scales.kind == ScaleKind::kFloat32) {
    Floats values;
    std::memcpy(&values, static_cast<const float*>(scales.fine) + at, sizeof values);
    return values;
  }
  if (scales.kind != ScaleKind::kOfCoarse)
    return load_halves(static_cast<const uint16_t*>(scales.fine) + at,
                       scales.kind == ScaleKind::kBfloat16);
  const int64_t inputs = groups * group;
  const int64_t coarse = panel * (inputs / kvq::kCoarse) + g * group / kvq::kCoarse;
  return load_bytes(static_cast<const int8_t*>(scales.fine) + at) *
         load_halves(scales.coarse + coarse * kPanelOutputs + lane, false);
}

// Minima of group g, whose scales are given.
inline Floats minima_at(const kvq::Scales& minima, int64_t panel, int64_t groups, int64_t g,
                        int64_t group, int64_t lane, Floats scale) {
  if (minima.kind != kvq::ScaleKind::kOfScale)
    return scales_at(minima, panel, groups, g, group, lane);
  const int64_t at = (panel * groups + g) * kPanelOutputs + lane;
  return load_bytes(static_cast<const int8_t*>(minima.fine) + at) * scale;
}

// Write outputs from `output` on of a row, as far as there are any.
inline void put_outputs(const PanelProduct& product, int64_t row, int64_t output, Floats values) {
  const int64_t outputs = product.weights->outputs, room = outputs - output;
  float* const y = product.y + row * outputs + output;
  if (room >= kLanes) std::memcpy(y, &values, sizeof values);  // of a known size: one instruction
  else if (room > 0) std::memcpy(y, &values, sizeof(float) * size_t(room));
}

}  // namespace
