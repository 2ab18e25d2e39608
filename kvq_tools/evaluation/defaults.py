"""The settings of an evaluation that nobody chose."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["decode", "chunked", "fake"]
MODES: tuple[Mode, ...] = get_args(Mode)

# dtype of a quantized cache's full-precision rows, whatever the model's
CACHE_DTYPE = "bfloat16"
BATCH = 4
# tokens of one decode step. Odd, so that steps end everywhere in a block: an error inside a block
# might be invisible at its end
STEP = 31
# tokens of a chunk of `chunked`, and of a slice in the other modes if its logits are not too large
CHUNK = 256
PROMPT = 128  # tokens of the prompt from which a cache takes statistics
MAX_WINDOW = 2048
BUCKETS = 8  # parts of a window
