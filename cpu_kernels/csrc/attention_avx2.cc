#include "attention.h"
#include "processors.h"
#include "prompt_rows.h"

void kvq::attend_span_avx2(const Span& span) { Attention(span).run(); }
void kvq::attend_rows_avx2(const PromptRows& rows) { attend_rows(rows); }
