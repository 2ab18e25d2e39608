#include "attention.h"
#include "processors.h"
#include "prompt_rows.h"

void kvq::attend_tokens_avx512(const Work& work) { Attention(work).run(); }
void kvq::attend_rows_avx512(const PromptRows& rows) { attend_rows(rows); }
