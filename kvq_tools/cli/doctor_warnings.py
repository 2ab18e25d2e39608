"""Find known problems of a cache with a model, for `kvq doctor`."""

from __future__ import annotations

import math

import numpy as np

import kvq_jax as kvq
from kvq_jax.codecs import kernel_readers
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.rope import rope_for

# keys of a normalized input are of order 1 to 10; a larger constant dominates its group
LARGE_BIAS = 10.0


def known_problems(
    config: LlamaConfig, cache: kvq.cache.Cache, biases: list[np.ndarray] | None
) -> list[str]:
    """Return the known problems of this cache with this model, one sentence each."""
    spec, problems = cache.spec, []
    windows = spec.sink + spec.recent + spec.block
    if (
        any(plan.quantizes for plan in cache.plans)
        and not spec.regions(cache.capacity).body_capacity
    ):
        problems.append(
            f"nothing is quantized within {cache.capacity} tokens: the full-precision windows hold"
            f" sink + recent + block = {windows}"
        )
    if config.rope.rope_type == "dynamic":
        problems.append(
            f"rope type dynamic: the base is frozen from the capacity ({cache.capacity}), since"
            " cached keys keep their rotation; output equals Hugging Face's up to"
            f" {config.max_position_embeddings} tokens"
        )
    if config.head_dim not in kernel_readers.HEAD_DIMS:
        problems.append(
            f"head_dim {config.head_dim} fits no GPU kernel; attention on a GPU runs on the XLA"
            " path"
        )
    problems += kvq.size.unmet_options(cache)
    return (
        problems
        + _padding_warnings(cache)
        + _bias_warnings(cache, biases)
        + _turning_warnings(config, cache, biases)
    )


def _padding_warnings(cache: kvq.cache.Cache) -> list[str]:
    layouts = [codec.facts.code_layout for plan in cache.plans for codec in plan.codecs]
    padded: dict[int, int] = {}
    for layout in filter(None, layouts):
        stored = layout.chunks * layout.width
        padded[layout.channels] = max(padded.get(layout.channels, 0), stored)
    return [
        f"codes of {channels} channels are padded to {stored} to fill words, and the padding is"
        " stored"
        for channels, stored in sorted(padded.items())
        if stored > channels
    ]


def _bias_warnings(cache: kvq.cache.Cache, biases: list[np.ndarray] | None) -> list[str]:
    """Warn of large key biases. Channels that share a scale are quantized with the step of the
    channel with the largest constant part. The rounding of floats is as large as they are, while
    other channels keep their precision."""
    problems = []
    for layer, (plan, bias) in enumerate(zip(cache.plans, biases or [], strict=False)):
        facts, largest = plan.k.facts, float(np.abs(bias).max())
        if not math.isfinite(largest):
            problems.append(f"layer {layer}: the k_proj bias is not finite")
            continue
        if largest < LARGE_BIAS:
            continue
        large = f"layer {layer}: k_proj bias up to {largest:.3g}"
        if facts.channel_group_bits is not None and facts.normalizes_channels:
            problems.append(
                f"{large}; dividing keys by their channel's norm removes only its square root: add"
                " subtract_bias=true"
            )
        elif facts.channel_group_bits is not None:
            step = 2 * largest / (2**facts.channel_group_bits - 1)
            problems.append(
                f"{large} makes steps of about {step:.3g} in per-token key groups, which erases"
                " smaller channels; add subtract_bias=true, or use per-channel keys before RoPE"
                f" (k=kivi:pre_rope=true) or skip_layers={layer}"
            )
        if facts.mantissa_bits is not None:
            problems.append(
                f"{large} is stored as floats of {facts.mantissa_bits} mantissa bits, in steps of"
                f" up to {largest / 2**facts.mantissa_bits:.3g}; add subtract_bias=true or"
                f" skip_layers={layer}"
            )
    return problems


def _turning_warnings(
    config: LlamaConfig, cache: kvq.cache.Cache, biases: list[np.ndarray] | None
) -> list[str]:
    """Warn of key biases that RoPE turns within a group of tokens.

    A constant (a, b) in pair i is r cos(p w_i + phi) in a channel after RoPE, r = |(a, b)|. From
    the first to the last of a group's t tokens it sweeps up to 2 r sin(min((t - 1) w_i, pi) / 2),
    and the group's range contains that.
    """
    frequencies = np.asarray(rope_for(config, cache.capacity).inverse_frequencies)
    problems = []
    for layer, (plan, bias) in enumerate(zip(cache.plans, biases or [], strict=False)):
        facts = plan.k.facts
        if facts.token_group is None or facts.form == "before_rope" or not np.isfinite(bias).all():
            continue
        bits, tokens = facts.token_group
        halves = bias.reshape(-1, 2, config.head_dim // 2)  # [K, 2, H/2]
        turned = np.minimum(frequencies * (min(tokens, cache.capacity) - 1), np.pi)
        sweeps = 2 * np.hypot(halves[:, 0], halves[:, 1]) * np.sin(turned / 2)
        head, pair = np.unravel_index(np.argmax(sweeps), sweeps.shape)
        if sweeps[head, pair] < 2 * LARGE_BIAS:
            continue
        shared = "a sequence" if math.isinf(tokens) else f"{tokens} tokens"
        remedy = "add subtract_bias=true, or " if facts.form == "vectors" else ""
        problems.append(
            f"layer {layer}: RoPE turns the k_proj bias of pair {pair} (KV head {head}) by"
            f" {sweeps[head, pair]:.3g} within groups of {shared}, steps of about"
            f" {sweeps[head, pair] / (2**bits - 1):.3g}; {remedy}use keys before RoPE"
            f" (k=kivi:pre_rope=true) or skip_layers={layer}"
        )
    return problems
