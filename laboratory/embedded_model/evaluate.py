"""The evaluation on the model card: perplexity, bits per byte, pass-key recall and greedy text, in
full precision and without a cache.

perplexity = exp(nll / tokens),   bits per byte = nll / (ln 2 * UTF-8 bytes of those tokens)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from kvq_models.llama.model import Llama
from laboratory.embedded_model.corpus import evaluation_rows
from laboratory.embedded_model.objective import token_losses, training_logits
from laboratory.embedded_model.synthetic import PASSKEY_FACT, PASSKEY_PROMPT
from laboratory.embedded_model.tokenizer import END_ID


@dataclasses.dataclass(frozen=True)
class TextScore:
    """Held-out quality of one text."""

    characters: int
    tokens: int
    utf8_bytes: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float


def score_text(llama: Llama, tokenizer: Tokenizer, text: str, window: int = 1024) -> TextScore:
    """Score consecutive windows of `window` tokens, each after END_OF_TEXT and without earlier
    context; a shorter tail is dropped."""
    stream = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
    rows = evaluation_rows(stream, window)
    row_losses = jax.jit(lambda model, row: token_losses(model, row).sum())
    nats = float(sum(row_losses(llama, row[None]) for row in rows))
    scored = rows[:, 1:].ravel()
    scored_text = tokenizer.decode(scored.tolist())
    utf8_bytes = len(scored_text.encode())
    return TextScore(
        characters=len(scored_text),
        tokens=scored.size,
        utf8_bytes=utf8_bytes,
        nats_per_token=nats / scored.size,
        perplexity=math.exp(nats / scored.size),
        bits_per_byte=nats / (math.log(2) * utf8_bytes),
    )


def passkey_recall(
    llama: Llama, tokenizer: Tokenizer, filler: str, distances: Sequence[int], trials: int
) -> dict[int, dict[str, float]]:
    """Return, for each distance, the share of pass keys repeated exactly and the share of their
    digits, by greedy decoding.

    The prompt is END_OF_TEXT, a fact, `distance` tokens of `filler` (held-out text) and the
    question. One forward pass over prompt and answer decides a trial: greedy decoding gives the
    whole key exactly when every digit is ranked first after the right ones before it.
    """
    filler_tokens = np.array(tokenizer.encode(filler, add_special_tokens=False).ids)
    rng = np.random.default_rng(0)
    first_choice = jax.jit(lambda model, row: jnp.argmax(training_logits(model, row), -1))
    recall = {}
    for distance in distances:
        hits = []
        for _ in range(trials):
            key = "".join(map(str, rng.integers(0, 10, 5)))
            start = int(rng.integers(0, len(filler_tokens) - distance))
            row = _passkey_row(tokenizer, key, filler_tokens[start : start + distance].tolist())
            hits.append(np.asarray(first_choice(llama, np.array([row[:-1]])))[0, -5:] == row[-5:])
        recall[distance] = {
            "exact": float(np.mean([hit.all() for hit in hits])),
            "digits": float(np.mean(hits)),
        }
    return recall


def greedy_text(llama: Llama, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """Return the prompt and its greedy continuation."""
    tokens = tokenizer.encode(prompt).ids
    length = len(tokens) + new_tokens
    next_token = jax.jit(lambda model, row, last: jnp.argmax(training_logits(model, row)[0, last]))
    while len(tokens) < length:
        row = np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(next_token(llama, row, len(tokens) - 1)))
    return tokenizer.decode(tokens)


def _passkey_row(tokenizer: Tokenizer, key: str, filler: list[int]) -> list[int]:
    fact, prompt, answer = (
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in (PASSKEY_FACT.format(key=key), PASSKEY_PROMPT, key)
    )
    return [END_ID, *fact, *filler, *prompt, *answer]
