"""RoPE in GGUF files: scaling as llama.cpp reads it, and Llama 3's frequencies as quotients."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.gguf_fields import Fields, number, text, whole
from kvq_models.llama.rope_config import RopeConfig

ROPE_FACTORS = "rope_freqs.weight"


def rope_of(fields: Fields, architecture: str) -> RopeConfig:
    """Return the RoPE of a file's fields.

    As in llama.cpp, a factor without a type is linear, rope.scale_linear is its older name, and a
    factor of 0 or none is 1. Raises NotImplementedError for another type, and for an attention
    factor without YaRN.
    """
    theta = number(fields, f"{architecture}.rope.freq_base", 1e4)
    scaling = f"{architecture}.rope.scaling"
    kind = text(fields, f"{scaling}.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise NotImplementedError(
            f"GGUF field {scaling}.type={kind!r} is not supported; supported: none, linear, yarn"
        )
    older = number(fields, f"{architecture}.rope.scale_linear", 0)
    factor = number(fields, f"{scaling}.factor", older) or 1.0
    attention_factor = number(fields, f"{scaling}.attn_factor", 1)
    if kind != "yarn" and attention_factor != 1:
        raise NotImplementedError(
            f"GGUF field {scaling}.attn_factor={attention_factor:g} is not supported with"
            f" {scaling}.type={kind!r}; supported: 1"
        )
    if kind == "none" or (factor == 1 and attention_factor == 1):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=whole(
            fields,
            f"{scaling}.original_context_length",
            whole(fields, f"{architecture}.context_length"),
        ),
        # llama.cpp multiplies YaRN's own factor by it
        attention_factor=(
            None
            if attention_factor == 1
            else attention_factor * (1 + 0.1 * math.log(max(factor, 1.0)))
        ),
        beta_fast=number(fields, f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=number(fields, f"{scaling}.yarn_beta_slow", 1.0),
    )


def llama3_rope(config: LlamaConfig, factors: np.ndarray) -> RopeConfig:
    """Return Llama 3's rescaling from the quotients of frequencies [H/2] that the file stores.
    Raise NotImplementedError for any other rescaling."""
    largest = float(factors.max(initial=1.0))
    if (
        config.rope.rope_type != "default"
        or factors.shape != (config.head_dim // 2,)
        or not 1 < largest < 2**20
    ):
        raise NotImplementedError(
            f"GGUF tensor {ROPE_FACTORS!r} of shape {factors.shape} is not Llama 3's rescaling of"
            " RoPE"
        )
    from kvq_models.llama.rope import rope_for  # imported late: it needs JAX

    # every published Llama 3.x has these factors and this original context
    rope = RopeConfig(
        rope_type="llama3",
        theta=config.rope.theta,
        factor=round(largest, 3),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain, rescaled = (
        np.asarray(rope_for(c, 1).inverse_frequencies)
        for c in (config, dataclasses.replace(config, rope=rope))
    )
    if not np.allclose(plain / rescaled, factors, rtol=1e-4, atol=0):
        raise NotImplementedError(
            f"GGUF tensor {ROPE_FACTORS!r} is not Llama 3's rescaling of RoPE by {rope.factor:g}"
        )
    return rope
