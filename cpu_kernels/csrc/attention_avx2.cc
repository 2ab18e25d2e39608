#include "attention.h"

void kvq::attend_span_avx2(const Span& span) { Attention(span).run(); }
