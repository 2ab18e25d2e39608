#include "attention.h"

void kvq::attend_span_avx512(const Span& span) { Attention(span).run(); }
