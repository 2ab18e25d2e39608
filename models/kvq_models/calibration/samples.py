"""Draw the samples of a calibration: random windows of a text's tokens."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Int

from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import int32
from kvq_models.llama.config import LlamaConfig


def draw(
    token_ids: Integers, samples: int, length: int, seed: int, bos: int | None
) -> Int[np.ndarray, "{samples} {length}+1"]:
    """Draw `samples` windows of length + 1 tokens from anywhere in the text: `length` inputs and,
    for each, the next token to predict.

    The same seed draws the same windows. They may overlap. If the text begins with the token that
    opens a text, so does each window: models that were trained with it (Gemma) have other keys,
    values and gradients without it.

    Args:
        token_ids: the text's tokens, [n] integers.
        samples: number of windows.
        length: inputs of a window.
        seed: of the places.
        bos: the token that opens a text, or None.

    Raises ValueError if the text has no window of that length.
    """
    tokens = np.asarray(token_ids)
    opened = int(tokens[0] == bos)
    starts = np.random.default_rng(seed).integers(opened, tokens.size - length + opened, samples)
    windows = tokens[starts[:, None] + np.arange(length + 1 - opened)]
    return np.pad(windows, ((0, 0), (opened, 0)), constant_values=tokens[0]).astype(np.int32)


def check(token_ids: Integers, samples: int, length: int, config: LlamaConfig) -> None:
    """Raise ValueError, in one line, if no samples can be drawn from these tokens for this
    model."""
    tokens = np.asarray(int32("token_ids", token_ids))
    if samples < 1 or length < 1:
        raise ValueError(
            f"a calibration needs at least one sample of one token: {samples=}, {length=}"
        )
    if tokens.ndim != 1 or tokens.size < length + 1:
        raise ValueError(
            f"a length of {length} needs a text of at least {length + 1} tokens, and this one has"
            f" {tokens.size}"
        )
    check_vocabulary(tokens, config)


def check_vocabulary(tokens: Int[np.ndarray, "n"], config: LlamaConfig) -> None:
    """Raise ValueError, in one line, for a token that the model does not know."""
    outside = (tokens < 0) | (tokens >= config.vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"token id {tokens[at]} at position {at} is outside the vocabulary of"
            f" {config.vocab_size}"
        )


def sha256(token_ids: Integers) -> str:
    """Return the sha256 of a text's token ids as little-endian int32. It identifies a text whatever
    its file is called."""
    return hashlib.sha256(np.asarray(token_ids).astype("<i4").tobytes()).hexdigest()
