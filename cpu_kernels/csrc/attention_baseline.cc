#include "attention.h"
#include "processors.h"
#include "prompt_rows.h"

void kvq::attend_span_baseline(const Span& span) { Attention(span).run(); }
void kvq::attend_rows_baseline(const PromptRows& rows) { attend_rows(rows); }
