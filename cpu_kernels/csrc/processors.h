// The kernels, compiled once for each kind of processor (setup.py), and the choice at run time.
#pragma once

#include "body.h"
#include "prompt.h"
#include "weights.h"

namespace kvq {

void attend_tokens_baseline(const Work&);
void attend_tokens_avx2(const Work&);
void attend_tokens_avx512(const Work&);

void attend_rows_baseline(const PromptRows&);
void attend_rows_avx2(const PromptRows&);
void attend_rows_avx512(const PromptRows&);

extern const Multiplier multiplier_baseline, multiplier_avx2, multiplier_avx512, multiplier_vnni;

struct Kernels {
  AttendTokens attend_tokens;
  AttendRows attend_rows;
  const Multiplier* multiplier;
  const char* name;
};

// The kernels for this processor.
const Kernels& best_kernels();

}  // namespace kvq
