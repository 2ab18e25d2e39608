// The bound of scores, c tanh(s / c).
#pragma once

#include "vectors.h"

namespace {

// tanh(x), to 4 units in the last place, NaN for NaN. Source of the polynomial: Cephes.
inline Floats tanh_of(Floats x) {
  const Floats size = larger(x, -x), square = x * x, decay = exp_of(size * -2.0f);
  Floats p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  p = p * square * x + x;
  const Uints sign = (Uints)x & 0x80000000u;
  const Floats large = (Floats)((Uints)((1.0f - decay) / (1.0f + decay)) | sign);
  return choose(size >= 0.625f, large, p);
}

// Bound the scores of tokens begin .. end - 1, whole vectors.
inline void cap_scores(float* scores, int64_t begin, int64_t end, float cap) {
  for (int64_t t = begin; t < end; t += kLanes)
    store(scores + t, tanh_of(load(scores + t) / cap) * cap);
}

}  // namespace
