// One product of rows of activations with packed weights, whose panels and rows are cut into tasks
// run by any threads.
#pragma once

#include "tasks.h"
#include "weights.h"

namespace kvq {

struct PackedCall {
  PackedMatrix weights;
  const float* x;  // [T, I]
  int64_t tokens;
  float* y;  // [T, O]
};

// Fill y. `helpers` is how many threads `schedule` may use besides this one. Results do not depend
// on it, nor a row's result on the other rows.
void multiply(const PackedCall& call, MultiplyPanels kernel, int64_t helpers,
              const Schedule& schedule);

}  // namespace kvq
