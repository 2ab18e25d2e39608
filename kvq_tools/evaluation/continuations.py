"""Score continuations: the log-probability of the last tokens of rows, read through a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.cache.cache import init_cache
from kvq_jax.cache.spec import CacheSpec
from kvq_models.inference.checked_input import right_padded
from kvq_models.inference.decoding import decode_scan, prefill
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.compare import token_nats
from kvq_tools.evaluation.defaults import STEP
from kvq_tools.evaluation.tasks.runner import MIN_CAPACITY


class ContinuedRow(NamedTuple):
    """The tokens of a row: its last `new` tokens are scored, its first `prompt` ones prefilled."""

    tokens: list[int]
    new: int
    prompt: int


def score_continuations(
    llama: Llama, spec: CacheSpec, rows: Sequence[ContinuedRow], capacity: int
) -> list[tuple[float, bool]]:
    """Return (log-probability, True if each token was the likeliest) for rows that run together in
    a cache of this capacity."""
    cache = init_cache(spec, llama.config, len(rows), capacity, llama.embed[...].dtype)
    longest = max(row.prompt for row in rows)
    if longest:
        width = min(-(-longest // MIN_CAPACITY) * MIN_CAPACITY, capacity)
        prompts = padded_to([row.tokens[: row.prompt] for row in rows], width)
        _, cache = prefill(llama, cache, prompts, np.array([row.prompt for row in rows]))
        width = max(row.new for row in rows)
    else:
        width = capacity
    width = -(-width // STEP) * STEP
    rest = padded_to([row.tokens[row.prompt :] for row in rows], width + 1)
    # a row's padding comes after everything that is scored, and past the capacity it is not written
    now, following = jnp.asarray(rest[:, :-1]), jnp.asarray(rest[:, 1:])
    (logprobs, greedy), _ = decode_scan(
        llama, cache, now, jnp.full(len(rows), width), (following,), _predictions, STEP
    )
    logprobs, greedy = np.asarray(logprobs, np.float64), np.asarray(greedy)
    ends = [len(row.tokens) - 1 - row.prompt for row in rows]
    scored = [slice(end - row.new, end) for row, end in zip(rows, ends, strict=True)]
    return [
        (float(logprobs[i, part].sum()), bool(greedy[i, part].all()))
        for i, part in enumerate(scored)
    ]


def padded_to(rows: list[list[int]], width: int) -> Int[np.ndarray, "B width"]:
    """Return the rows padded on the right, or cut, to `width` tokens."""
    tokens, _ = right_padded(rows)
    return np.pad(tokens[:, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))


def _predictions(
    logits: Float[Array, "B T V"], following: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return (log p(following), argmax p == following)."""
    return -token_nats(logits, following), jnp.argmax(logits, axis=-1) == following
