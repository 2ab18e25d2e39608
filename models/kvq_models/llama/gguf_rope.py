"""RoPE in GGUF files: scaling as llama.cpp reads it, and Llama 3's frequencies as quotients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.gguf_fields import Fields, number, positive, text, whole
from kvq_models.llama.rope_config import RopeConfig
from kvq_models.llama.stored_tensor import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)  # tensors of the configuration


def ropes_of(
    fields: Fields,
    architecture: str,
    head_dim: int,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the RoPE of a file's fields, and the one of windowed layers if they have their own.

    shapes, read: of the file's tensors by name. Phi-3's factors are tensors. Raises CheckpointError
    if the file has those of one length alone.
    """
    missing = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name not in shapes]
    if len(missing) == 1:
        raise CheckpointError(
            f"the file lacks tensor {missing[0]!r}, and has the RoPE factors of other lengths:"
            " convert the model again"
        )
    rope = rope_of(fields, architecture, not missing)
    if architecture == "phi3":
        rotated = positive(fields, f"{architecture}.rope.dimension_count", head_dim)
        if rotated > head_dim:
            raise ValueError(
                f"GGUF field {architecture}.rope.dimension_count={rotated} must be at most the head"
                f" dim {head_dim}"
            )
        rope = dataclasses.replace(rope, partial_rotary_factor=rotated / head_dim)
        if rope.rope_type == "longrope":
            short, long = (
                tuple(float(str(factor)) for factor in read(name))
                for name in (SHORT_FACTORS, LONG_FACTORS)
            )
            rope = dataclasses.replace(rope, short_factor=short, long_factor=long)
    default = 1e4 if architecture == "gemma3" else rope.theta
    theta = number(fields, f"{architecture}.rope.freq_base_swa", default)
    if architecture in ("gemma3", "olmo2"):  # as in llama.cpp: scaling is of full layers alone
        return rope, RopeConfig(theta=theta)
    return rope, None if theta == rope.theta else dataclasses.replace(rope, theta=theta)


def rope_of(fields: Fields, architecture: str, longrope: bool) -> RopeConfig:
    """Return the RoPE of a file's fields, without longrope's factors.

    As in llama.cpp, a factor without a type is linear, rope.scale_linear is its older name, and a
    factor of 0 or none is 1. Raises NotImplementedError for another type, and for an attention
    factor without YaRN.
    """
    theta = number(fields, f"{architecture}.rope.freq_base", 1e4)
    scaling = f"{architecture}.rope.scaling"
    kind = text(fields, f"{scaling}.type", "linear")
    kinds = ("none", "linear", "yarn", *(("longrope",) if longrope else ()))
    if kind not in kinds:
        raise NotImplementedError(
            f"GGUF field {scaling}.type={kind!r} is not supported; supported: {', '.join(kinds)}"
        )
    older = number(fields, f"{architecture}.rope.scale_linear", 0)
    factor = number(fields, f"{scaling}.factor", older) or 1.0
    attention_factor = number(fields, f"{scaling}.attn_factor", 1)
    original = whole(
        fields,
        f"{scaling}.original_context_length",
        whole(fields, f"{architecture}.context_length"),
    )
    if longrope:
        return RopeConfig(
            rope_type="longrope",
            theta=theta,
            factor=whole(fields, f"{architecture}.context_length") / max(original, 1),
            original_max_position_embeddings=original,
            attention_factor=attention_factor,
        )
    if kind != "yarn" and attention_factor != 1:
        raise NotImplementedError(
            f"GGUF field {scaling}.attn_factor={attention_factor:g} is not supported with"
            f" {scaling}.type={kind!r}; supported: 1"
        )
    beta = number(fields, f"{architecture}.attention.temperature_scale", 0)
    if beta and kind != "yarn":
        raise NotImplementedError(
            f"GGUF field {architecture}.attention.temperature_scale={beta:g} is not supported with"
            f" {scaling}.type={kind!r}; supported: 0"
        )
    if kind == "none" or (factor == 1 and attention_factor == 1 and not beta):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    # YaRN's own factor; a multiplier divides it, as mscale_all_dim does that of mscale=1
    multiplier = number(fields, f"{scaling}.yarn_log_multiplier", 0)
    logarithm = math.log(max(factor, 1.0))
    divisor = 1 + 0.1 * max(multiplier, 0.0) * logarithm  # RopeConfig refuses negative ones
    of_yarn = (1 + 0.1 * logarithm) / divisor
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        # gpt-oss was trained with bounds between channels, which no field says
        truncate=architecture != "gpt-oss",
        # llama.cpp multiplies YaRN's own factor by it
        attention_factor=None if attention_factor == 1 else attention_factor * of_yarn,
        beta_fast=number(fields, f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=number(fields, f"{scaling}.yarn_beta_slow", 1.0),
        mscale=1.0 if multiplier else None,
        mscale_all_dim=multiplier or None,
        llama_4_scaling_beta=beta or None,
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
