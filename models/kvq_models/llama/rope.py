"""Rotary frequencies of a model, for six RoPE types of Hugging Face's families.

    w_i = theta^(-2 i / R),  i = 0 .. R/2 - 1,  then rescaled by type:

    default   w
    linear    w / factor
    dynamic   w with theta' = theta * (factor * S / P - (factor - 1))^(R / (R - 2)),  S =
              max(capacity, P),  P = max_position_embeddings
    llama3    w / factor for wavelengths above P0 / low_freq_factor, w below P0 / high_freq_factor,
              a linear blend in between
    yarn      w / factor for channels past the slow bound, w before the fast bound, a linear blend
              in between; and an attention factor
    longrope  w / long_factor_i if capacity > P0, else w / short_factor_i; and an attention factor

R = H, or partial_rotary_factor * H: the other pairs of a head do not rotate, w = 0 (Phi-4-mini).
Pairs are (i, i + H/2), so weights of queries and keys are loaded with their channels in that order
(fused_tensors.py).

Ministral 3 also scales a query by its position p, so that scores of long texts do not level out:

    q' = q (1 + beta ln(1 + floor(p / P0))),  P0 = original_max_position_embeddings

Sources: Su et al., RoFormer, 3.4.2; position interpolation, Chen et al. 2023 (linear); "NTK-aware"
scaling (dynamic); Llama 3.1 (llama3); Peng et al., YaRN, 3.2-3.4 (yarn); Ding et al., LongRoPE
(longrope); Llama 4 (beta). Computed in float32 step by step as transformers does, so that both
rotate by the same angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvq_jax.types.array_types import PositionsBT
from kvq_jax.types.rope import Rope
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.rope_config import RopeConfig, rotary_dim

Frequencies = np.ndarray  # [H/2] float32, radians per token


class Ropes(NamedTuple):
    """The rotations of a model's layers: of those with full attention, and of windowed ones."""

    full: Rope
    windowed: Rope


def ropes_for(config: LlamaConfig, capacity: int) -> Ropes:
    """Return the rotations of `config` for sequences of up to `capacity` tokens."""
    full = rope_for(config, capacity)
    local = config.local_rope
    return Ropes(full, full if local is None else _rope(config, local, capacity))


def rope_for(config: LlamaConfig, capacity: int) -> Rope:
    """Return the rotation of the layers with full attention, for sequences of up to `capacity`
    tokens.

    Only `dynamic` and `longrope` depend on the capacity: they are frozen at the longest length,
    because cached keys keep the rotation they were written with. For capacity <=
    max_position_embeddings, `dynamic` equals transformers' at every length, and for capacity <=
    original_max_position_embeddings, so does `longrope`.
    """
    return _rope(config, config.rope, capacity)


def query_factor(rope: RopeConfig, positions: PositionsBT) -> Float[Array, "B 1 T 1"] | None:
    """Return the factor of queries [B, N, T, H] at these positions, float32, or None if the model
    has none."""
    beta = rope.llama_4_scaling_beta
    if not beta:
        return None
    passed = jnp.maximum(positions, 0) // rope.original_max_position_embeddings
    return (1 + beta * jnp.log1p(passed.astype(jnp.float32)))[:, None, :, None]


def _rope(config: LlamaConfig, rope: RopeConfig, capacity: int) -> Rope:
    rotated = rotary_dim(rope, config.head_dim)
    frequencies = _inverse_frequencies(rope, rotated, capacity, config.max_position_embeddings)
    factor = np.asarray(_attention_factor(rope), np.float32)
    if still := (config.head_dim - rotated) // 2:
        frequencies = np.pad(frequencies, (0, still))
        factor = np.pad(np.broadcast_to(factor, (rotated // 2,)), (0, still), constant_values=1)
    return Rope(inverse_frequencies=jnp.asarray(frequencies), attention_factor=jnp.asarray(factor))


def _inverse_frequencies(rope: RopeConfig, dim: int, capacity: int, positions: int) -> Frequencies:
    match rope.rope_type:
        case "default":
            return _default(rope.theta, dim)
        case "linear":
            return _default(rope.theta, dim) / np.float32(rope.factor)
        case "dynamic":
            return _default(_dynamic_theta(rope, dim, capacity, positions), dim)
        case "llama3":
            return _llama3(_default(rope.theta, dim), rope)
        case "yarn":
            return _yarn(_default(rope.theta, dim), rope, dim)
        case "longrope":
            is_long = capacity > rope.original_max_position_embeddings
            factors = np.asarray(rope.long_factor if is_long else rope.short_factor, np.float32)
            exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
            return np.float32(1) / (factors * np.float32(rope.theta) ** exponents)
        case other:
            raise AssertionError(f"RopeConfig admits no rope_type={other!r}")


def _default(theta: float, dim: int) -> Frequencies:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.float32(theta) ** exponents


def _dynamic_theta(rope: RopeConfig, dim: int, capacity: int, max_positions: int) -> float:
    length = max(capacity, max_positions)
    return rope.theta * (rope.factor * length / max_positions - (rope.factor - 1)) ** (
        dim / (dim - 2)
    )


def _llama3(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    """Rescale the frequencies of long wavelengths, 2 pi / w tokens. `blend` is 1 at the
    high-frequency bound and 0 at the other."""
    turns = np.float32(rope.original_max_position_embeddings) * plain / np.float32(2 * math.pi)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    blend = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (1 - blend) * plain / np.float32(rope.factor) + blend * plain


def _yarn(plain: Frequencies, rope: RopeConfig, dim: int) -> Frequencies:
    def channel_of(rotations: float) -> float:
        """Return the channel pair that turns `rotations` times over the original context."""
        return (
            dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    fast, slow = channel_of(rope.beta_fast), channel_of(rope.beta_slow)
    if rope.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, dim - 1)
    width = slow - fast if slow != fast else 0.001
    interpolated = np.clip(
        (np.arange(dim // 2, dtype=np.float32) - np.float32(fast)) / np.float32(width),
        np.float32(0),
        np.float32(1),
    )
    return plain / np.float32(rope.factor) * interpolated + plain * (1 - interpolated)


def _attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cosines and sines. Its square scales the scores. It is 1 except for yarn
    and longrope."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        original = math.log(rope.original_max_position_embeddings)
        return math.sqrt(1 + math.log(rope.factor) / original) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
