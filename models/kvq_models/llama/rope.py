"""Rotary frequencies of a model, for the five RoPE types of Hugging Face's Llama family.

    w_i = theta^(-2 i / H),  i = 0 .. H/2 - 1,  then rescaled by type:

    default   w
    linear    w / factor
    dynamic   w with theta' = theta * (factor * S / P - (factor - 1))^(H / (H - 2)),  S =
              max(capacity, P),  P = max_position_embeddings
    llama3    w / factor for wavelengths above P0 / low_freq_factor, w below P0 / high_freq_factor,
              a linear blend in between
    yarn      w / factor for channels past the slow bound, w before the fast bound, a linear blend
              in between; and an attention factor

Sources: Su et al., RoFormer, 3.4.2; position interpolation, Chen et al. 2023 (linear); "NTK-aware"
scaling (dynamic); Llama 3.1 (llama3); Peng et al., YaRN, 3.2-3.4 (yarn). Computed in float32 step
by step as transformers does, so that both rotate by the same angles.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from kvq_jax.types.rope import Rope
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.rope_config import RopeConfig

Frequencies = np.ndarray  # [H/2] float32, radians per token


def rope_for(config: LlamaConfig, capacity: int) -> Rope:
    """Return the rotation of `config` for sequences of up to `capacity` tokens.

    Only `dynamic` depends on the capacity: its base is frozen at the longest length, because cached
    keys keep the rotation they were written with. For capacity <= max_position_embeddings it equals
    transformers' at every length. Raises ValueError for a capacity beyond the model's sliding
    window: every code path that runs layers calls this first.
    """
    config.check_window(capacity)
    frequencies = _inverse_frequencies(config, capacity)
    return Rope(
        inverse_frequencies=jnp.asarray(frequencies),
        attention_factor=jnp.asarray(_attention_factor(config.rope), jnp.float32),
    )


def _inverse_frequencies(config: LlamaConfig, capacity: int) -> Frequencies:
    rope, dim = config.rope, config.head_dim
    match rope.rope_type:
        case "default":
            return _default(rope.theta, dim)
        case "linear":
            return _default(rope.theta, dim) / np.float32(rope.factor)
        case "dynamic":
            return _default(
                _dynamic_theta(rope, dim, capacity, config.max_position_embeddings), dim
            )
        case "llama3":
            return _llama3(_default(rope.theta, dim), rope)
        case "yarn":
            return _yarn(_default(rope.theta, dim), rope, dim)
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
    """Return the factor of cosines and sines. Its square scales the scores. It is 1 except for
    yarn."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
