#include "attention.h"

void kvq::attend_span_baseline(const Span& span) { Attention(span).run(); }
