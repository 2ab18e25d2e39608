"""Find known problems of a cache with a model, for `kvq doctor`."""

from __future__ import annotations

import numpy as np

import kvq_jax as kvq
from kvq_jax.codecs import kernel_readers
from kvq_models.llama.config import LlamaConfig

# keys of a normalized input are of order 1 to 10; a larger constant dominates its group
LARGE_BIAS = 10.0


def known_problems(
    config: LlamaConfig, cache: kvq.Cache, biases: list[np.ndarray] | None
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
    problems += kvq.unmet_options(cache)
    return problems + _padding_warnings(cache) + _bias_warnings(cache, biases)


def _padding_warnings(cache: kvq.Cache) -> list[str]:
    padded: dict[int, int] = {}
    for layout in (codec.facts.code_layout for plan in cache.plans for codec in plan.codecs):
        if layout is not None:
            padded[layout.channels] = max(
                padded.get(layout.channels, 0), layout.chunks * layout.width
            )
    return [
        f"codes of {channels} channels are padded to {stored} to fill words, and the padding is"
        " stored"
        for channels, stored in sorted(padded.items())
        if stored > channels
    ]


def _bias_warnings(cache: kvq.Cache, biases: list[np.ndarray] | None) -> list[str]:
    """Warn of large key biases: channels that share a scale are quantized with the step of the
    channel with the largest constant part."""
    problems = []
    for layer, (plan, bias) in enumerate(zip(cache.plans, biases or [], strict=False)):
        bits, largest = plan.k.facts.channel_group_bits, float(np.abs(bias).max())
        if bits is None or largest < LARGE_BIAS:
            continue
        if plan.k.facts.normalizes_channels:
            problems.append(
                f"layer {layer}: k_proj bias up to {largest:.3g}; dividing keys by their channel's"
                " norm removes only its square root: add subtract_bias=true"
            )
        else:
            step = 2 * largest / (2**bits - 1)
            problems.append(
                f"layer {layer}: k_proj bias up to {largest:.3g} makes steps of about {step:.3g} in"
                " per-token key groups, which erases smaller channels; add subtract_bias=true, or"
                f" use per-channel keys (k=kivi) or skip_layers={layer}"
            )
    return problems
