"""Read one chunk of a request's prompt into a row of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import Accepted
from kvq_models.inference.engine.compiling import Kind
from kvq_models.inference.prompts import read_prompt
from kvq_models.llama.model import Llama


def chunk_of(accepted: Accepted, read: int, widths: Sequence[int]) -> tuple[int, int]:
    """Return the number of prompt tokens to read after `read` of them, and the width of the program
    that reads them."""
    count = min(len(accepted.request.prompt) - read, widths[-1])
    return count, next(width for width in widths if width >= count)


def kinds_of(accepted: Accepted, widths: Sequence[int]) -> list[Kind]:
    """Return the programs that read the whole prompt."""
    chunks = range(0, len(accepted.request.prompt), widths[-1])
    needed = sorted({chunk_of(accepted, read, widths)[1] for read in chunks})
    return [(width, accepted.request.prompt_logprobs) for width in needed]


def read_chunk(
    llama: Llama,
    row: Cache,
    accepted: Accepted,
    count: int,
    width: int,
    implementation: Implementation,
) -> tuple[jax.Array, Cache]:
    """Read the next `count` tokens with the program of this width. Return (the logits [1, V] after
    them, the row), and note the scores that the request asks for."""
    prompt, read = accepted.request.prompt, accepted.read
    tokens, following = np.zeros((2, 1, width), np.int32)
    tokens[0, :count] = prompt[read : read + count]
    lengths = np.array([count], np.int32)
    if accepted.request.prompt_logprobs:
        after = prompt[read + 1 : read + 1 + count]
        following[0, : len(after)] = after
        logits, scores, row = programs.score_chunk(
            llama, row, tokens, lengths, following, implementation
        )
        accepted.add_scores(len(after), *(np.asarray(score) for score in scores))
    else:
        logits, row = read_prompt(llama, row, tokens, lengths, implementation=implementation)
    accepted.read += count
    return logits, row
