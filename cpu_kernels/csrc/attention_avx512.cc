#include "attention.h"
#include "processors.h"
#include "prompt_rows.h"

void kvq::attend_span_avx512(const Span& span) { Attention(span).run(); }
void kvq::attend_rows_avx512(const PromptRows& rows) { attend_rows(rows); }
