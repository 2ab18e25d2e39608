"""Windows over a text, as in "Perplexity of fixed-length models" of the Hugging Face documentation.

A window starts every `stride` tokens and scores the tokens that no earlier window has scored. So
each token except the text's first is scored once, and after the first window with at least window -
stride tokens of context. If stride == window, a window's first token has no context and is not
scored. Each scored token has the same weight (the documentation's code counts one token too few in
every later window).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvq_jax.types.array_types import Integers
from kvq_jax.types.integers import int32
from kvq_models.calibration.samples import check_vocabulary
from kvq_models.llama.config import LlamaConfig


class TextWindow(NamedTuple):
    """Tokens begin .. end - 1 of a text. The tokens from begin + first on are scored."""

    begin: int
    end: int
    first: int


def windows(tokens: int, window: int, stride: int, prompt: int = 0) -> tuple[TextWindow, ...]:
    """Return the windows of a text that score something. The first `prompt` tokens of a window are
    not scored, nor is the token after them: no cache has been read when it is predicted."""
    cut, scored = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        cut.append(TextWindow(begin, end, max(scored - begin, prompt + 1)))
        scored = end
        if end == tokens:
            break
    return tuple(w for w in cut if w.first < w.end - w.begin)


def opened(
    rows: Int[np.ndarray, "R T"], token_ids: Integers, bos: int | None
) -> Int[np.ndarray, "R T"]:
    """Return windows of a text with the token that opens every text, if this one begins with it, in
    place of their first token, which is not scored. Without it Gemma is another model."""
    first = np.asarray(token_ids)[0]
    if first != bos:
        return rows
    return np.concatenate([np.full_like(rows[:, :1], first), rows[:, 1:]], axis=1)


def check_windows(
    config: LlamaConfig, token_ids: Integers, window: int, stride: int, prompt: int = 0
) -> None:
    """Raise ValueError, in one line, if a text cannot be scored in these windows."""
    ids = np.asarray(int32("token_ids", token_ids))
    if ids.ndim != 1 or ids.size < 2:
        raise ValueError(
            f"an evaluation needs a text of at least two tokens, and this one has {ids.size}"
        )
    check_vocabulary(ids, config)
    if window < 2:
        raise ValueError(f"a window of {window} predicts nothing: give at least two tokens")
    if window > config.positions:
        raise ValueError(
            f"a window of {window} tokens is beyond the {config.positions} positions of the model"
        )
    if not 1 <= stride <= window:
        raise ValueError(
            f"a stride of {stride} tokens must be between 1 and the window of {window}: other"
            " tokens would not be scored"
        )
    if not 0 <= prompt < min(window, ids.size) - 1:
        raise ValueError(
            f"a prompt of {prompt} tokens leaves nothing to score in windows of"
            f" {min(window, ids.size)}"
        )
    if prompt > window - stride and ids.size > window:
        raise ValueError(
            f"a prompt of {prompt} tokens must fit into the {window - stride} tokens that windows"
            f" of {window} with a stride of {stride} have in common"
        )
