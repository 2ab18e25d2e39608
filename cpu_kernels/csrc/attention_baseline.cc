#include "attention.h"
#include "processors.h"
#include "prompt_rows.h"

void kvq::attend_tokens_baseline(const Work& work) { Attention(work).run(); }
void kvq::attend_rows_baseline(const PromptRows& rows) { attend_rows(rows); }
