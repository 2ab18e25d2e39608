// One call of exact attention, whose query tokens are cut into tasks run by any threads.
#pragma once

#include "prompt.h"
#include "tasks.h"

namespace kvq {

struct PromptCall {
  const float* q;         // [B, K, G, T, H]
  const char* keys;       // [B, K, E, H]
  const char* values;     // [B, K, E, H]
  const int32_t* reach;   // [B, E0]: how many queries see the row, the first ones
  const int32_t* counts;  // [B, T]: how many of the other rows a query sees
  const int32_t* real;    // [B]: how many query tokens are not padding, the first ones
  int64_t type;           // Stored: of keys and values
  int64_t batch, heads, group, queries, channels, old, fresh;
  int64_t window;  // query token t sees no other row before t - window + 1, or 0 for none
  float scale, soft_cap;
  float* m;  // [B, K, G, T]
  float* l;  // [B, K, G, T]
  float* o;  // [B, K, G, T, H]
};

// Fill m, l and o. `helpers` is how many threads `schedule` may use besides this one. Results do
// not depend on it as long as keys and values are finite.
void attend_prompt(const PromptCall& call, AttendRows kernel, int64_t helpers,
                   const Schedule& schedule);

}  // namespace kvq
