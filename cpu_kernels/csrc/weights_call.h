// Products of the same rows of activations with packed weights, whose panels and rows are cut into
// tasks run by any threads.
#pragma once

#include <vector>

#include "tasks.h"
#include "weights.h"

namespace kvq {

struct PackedProduct {
  PackedMatrix weights;
  float* y;  // [T, O]
};

struct PackedCall {
  const float* x;  // [T, I]
  int64_t tokens, inputs;
  int64_t digits;  // 3, or 1 for activations rounded to 8 bits
  std::vector<PackedProduct> products;
};

// Fill each y. `helpers` is how many threads `schedule` may use besides this one. Results do not
// depend on it, and a row's result does not depend on the other rows. Rows of zeros, such as vacant
// slots and padding, are not multiplied: their results are zeros.
void multiply(const PackedCall& call, const Multiplier& kernel, int64_t helpers,
              const Schedule& schedule);

// The same for stacks of `experts` matrices, whose panels lie behind each other: row t of x meets
// matrix chosen[t] of each stack. Matrices that no row chooses are not read.
void multiply_chosen(const PackedCall& call, const int32_t* chosen, int64_t experts,
                     const Multiplier& kernel, int64_t helpers, const Schedule& schedule);

}  // namespace kvq
