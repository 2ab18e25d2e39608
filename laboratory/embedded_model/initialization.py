"""Initial weights in which an induction circuit is already wired: a short run can then sharpen
recall instead of having to discover it.

    layer 0, KV head 0      query head 0 attends to the token before, query head 1 to the one before
                            that. Each writes what it read into its own channels:
                            residual = [content | constant | previous token | the one before it]
    layer 1, both KV heads  q = projection of (this token, the previous),
                            k = the same projection of (the previous, the one before it). They match
                            where the same two tokens occurred before, and the value copies what
                            followed there into the content.

Positions come from RoPE alone: a constant channel makes constant queries and keys whose product
peaks at one distance, on the fast pairs; content is matched on the slow pairs, which hardly turn
within the context. Everything is trained afterwards; all other weights are random. Source: the
circuit of Elhage et al., A Mathematical Framework for Transformer Circuits; wired by hand rather
than learned.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvq_models.llama.model import Llama
from kvq_models.llama.rope import rope_for
from laboratory.embedded_model import state

EMBEDDING_STDDEV = 0.05
CONSTANT = 0.75
POSITION_LOGIT = 12.0  # how far the attended distance stands out, before the other pairs add to it
READ_GAIN = 0.05
MATCH_GAIN = 2.0
COPY_GAIN = 0.15
LOGIT_SCALE = 1.2
UNIGRAM_SPREAD = 0.03  # how much of the constant channel tells frequent tokens from rare ones
FINAL_CONSTANT = 8.0  # approximate value of the constant channel after the last RMSNorm


@dataclasses.dataclass(frozen=True)
class Channels:
    """The use of the residual channels at the start; each of the two earlier tokens has a quarter
    of them."""

    width: int

    @property
    def content(self) -> slice:
        return slice(0, self.width // 2 - 1)

    @property
    def constant(self) -> int:
        return self.width // 2 - 1

    @property
    def previous(self) -> slice:
        return slice(self.width // 2, 3 * self.width // 4)

    @property
    def before_previous(self) -> slice:
        return slice(3 * self.width // 4, self.width)


def wire_induction(llama: Llama, token_counts: np.ndarray, seed: int) -> Llama:
    """Wire an induction circuit into the first two layers; otherwise the model predicts every token
    by its share in `token_counts` [V].

    Raise ValueError unless width = 4 * head_dim, with 2 KV heads of 2 query heads each and a tied
    head.
    """
    config = llama.config
    wanted = dict(
        hidden_size=4 * config.head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"config field {name}={getattr(config, name)!r} must be {value!r} for a wired"
                " induction circuit"
            )
    rng = np.random.default_rng(seed)
    channels, head_dim = Channels(config.hidden_size), config.head_dim
    weights = {name: np.array(leaf) for name, leaf in state.parameters_of(llama).items()}
    embedding = weights["embed/value"]
    embedding[:, channels.content] *= EMBEDDING_STDDEV / embedding.std()
    embedding[:, channels.content.stop :] *= 0.1
    log_share = np.log((token_counts + 1) / np.sum(token_counts + 1))
    embedding[:, channels.constant] = CONSTANT * (
        1 + UNIGRAM_SPREAD * (log_share - log_share.mean()) / log_share.std()
    )
    weights["norm/scale/value"][:] = LOGIT_SCALE
    weights["norm/scale/value"][channels.constant] = log_share.std() / (
        UNIGRAM_SPREAD * CONSTANT * FINAL_CONSTANT
    )
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name][:] = 0  # a layer that is not wired starts as the identity
    read = _orthonormal(
        rng, channels.content.stop, head_dim
    )  # content -> the channels of an earlier token
    frequencies = np.asarray(
        rope_for(config, capacity=config.max_position_embeddings).inverse_frequencies
    )
    _wire_previous_tokens(weights, channels, head_dim, read, frequencies)
    for kv_head in range(2):
        _wire_match_and_copy(weights, channels, head_dim, read, kv_head, rng)
    return state.with_parameters(llama, {name: jnp.asarray(leaf) for name, leaf in weights.items()})


def _wire_previous_tokens(
    weights: dict[str, np.ndarray],
    channels: Channels,
    head_dim: int,
    read: np.ndarray,
    frequencies: np.ndarray,
) -> None:
    half = head_dim // 2
    fast = np.arange(half) < half // 4
    embedding = weights["embed/value"]
    constant = CONSTANT / np.sqrt(np.mean(embedding**2))  # the channel after RMSNorm
    nearest = float(
        np.sum(1 - np.cos(frequencies[fast]))
    )  # the drop one step beside the peak, before scaling
    amplitude = np.sqrt(POSITION_LOGIT * np.sqrt(head_dim) / nearest) / constant
    query, key, value, output = (weights[f"layers/0/{name}_proj/kernel/value"] for name in "qkvo")
    key[:, :head_dim] *= 0.1
    key[channels.constant, :head_dim] = _rotated(amplitude * fast, 0 * frequencies)
    value[:, :head_dim] = 0
    value[channels.content, :head_dim] = read
    for head, (distance, target) in enumerate(
        [(1, channels.previous), (2, channels.before_previous)]
    ):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        query[:, columns] *= 0.1
        query[channels.constant, columns] = _rotated(amplitude * fast, -distance * frequencies)
        output[columns, target] = READ_GAIN * np.eye(head_dim)


def _wire_match_and_copy(
    weights: dict[str, np.ndarray],
    channels: Channels,
    head_dim: int,
    read: np.ndarray,
    kv_head: int,
    rng: np.random.Generator,
) -> None:
    half, quarter = head_dim // 2, head_dim // 4
    slow = np.concatenate(
        [np.arange(quarter, half), half + np.arange(quarter, half)]
    )  # the channels of the slow pairs
    chosen = rng.permutation(head_dim)[: len(slow)]
    recent, earlier = chosen[: len(slow) * 5 // 8], chosen[len(slow) * 5 // 8 :]
    kv_columns = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
    query, key, value, output = (weights[f"layers/1/{name}_proj/kernel/value"] for name in "qkvo")
    key[:, kv_columns] *= 0.1
    match_key = np.zeros((len(query), head_dim))
    match_key[channels.previous.start + recent, slow[: len(recent)]] = MATCH_GAIN
    match_key[channels.before_previous.start + earlier, slow[len(recent) :]] = MATCH_GAIN
    key[:, kv_columns] += match_key
    match_query = np.zeros((len(query), head_dim))
    match_query[channels.content, slow[: len(recent)]] = MATCH_GAIN * read[:, recent]
    match_query[channels.previous.start + earlier, slow[len(recent) :]] = MATCH_GAIN
    columns = slice(2 * kv_head * head_dim, (2 * kv_head + 1) * head_dim)
    query[:, columns] = 0.1 * query[:, columns] + match_query
    copied = _orthonormal(rng, channels.content.stop, head_dim)
    value[:, kv_columns] *= 0.1
    value[channels.content, kv_columns] += copied
    output[columns, channels.content] = COPY_GAIN * copied.T


def _rotated(amplitude: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Return half-split pairs (amplitude, 0) turned by angles [H/2]."""
    return np.concatenate([amplitude * np.cos(angles), amplitude * np.sin(angles)])


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((rows, columns)))[0]
