// The kernels, compiled once for each kind of processor (setup.py), and the choice at run time.
#pragma once

#include "body.h"
#include "prompt.h"
#include "weights.h"

namespace kvq {

void attend_span_baseline(const Span&);
void attend_span_avx2(const Span&);
void attend_span_avx512(const Span&);

void attend_rows_baseline(const PromptRows&);
void attend_rows_avx2(const PromptRows&);
void attend_rows_avx512(const PromptRows&);

void multiply_panels_baseline(const PanelProduct&);
void multiply_panels_avx2(const PanelProduct&);
void multiply_panels_avx512(const PanelProduct&);

struct Kernels {
  AttendSpan attend_span;
  AttendRows attend_rows;
  MultiplyPanels multiply_panels;
  const char* name;
};

// The kernels for this processor.
const Kernels& best_kernels();

}  // namespace kvq
