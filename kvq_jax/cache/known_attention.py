"""Refuse a model's config if it asks for attention that this library does not compute.

A cache computes softmax(q K^T / sqrt(H)) V over all earlier tokens. A config that names something
else (a window, a soft cap, another scale, sinks) would get that, without a word. `CacheDims` name
nothing: with them, the caller sees to the difference.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

# families whose attention is special in a way that no field of their config says
SPECIAL_FAMILIES = {"gpt_oss": "attention sinks"}
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


def check_attention(config: Any, capacity: int) -> None:
    """Raise NotImplementedError, in one line that names the field, if a cache of this many tokens
    would not compute the attention of the config. A config of kvq_models was checked when it was
    read."""
    reason = None if hasattr(config, "windowed_layers") else _reason(config, capacity)
    if reason:
        raise NotImplementedError(
            f"{reason}; kvq computes softmax(q K^T / sqrt(head_dim)) V over all earlier tokens:"
            " pass kvq.CacheDims in place of the config if your model sees to the difference"
        )


def _reason(config: Any, capacity: int) -> str | None:
    def field(name: str) -> Any:
        return getattr(config, name, None)

    kinds: Collection[str] = field("layer_types") or ()
    other = sorted(set(kinds) - set(SUPPORTED_LAYERS))
    scale, head_dim = _scale(config), field("head_dim")
    if special := SPECIAL_FAMILIES.get(field("model_type")):
        return f"config field model_type={field('model_type')!r} has {special}"
    if other:
        return f"config field layer_types contains {', '.join(other)}"
    if (cap := field("attn_logit_softcapping")) is not None:
        return f"config field attn_logit_softcapping={cap} caps the scores"
    if scale is not None and not math.isclose(scale[1], head_dim**-0.5, rel_tol=1e-4):
        return f"config field {scale[0]} scales the scores by {scale[1]:.4g}"
    if field("alibi"):
        return "config field alibi=True adds a bias to the scores"
    if field("kv_lora_rank"):
        return f"config field kv_lora_rank={field('kv_lora_rank')}: keys and values are latents"
    window = _window(config, kinds)
    if window is not None and capacity > window:
        return (
            f"config field sliding_window={window} is shorter than the cache's {capacity} tokens,"
            f" and windows are not computed: capacity={window} is exact"
        )
    return None


def _scale(config: Any) -> tuple[str, float] | None:
    """Return the field that sets the scale of the scores, and the scale."""
    if (scalar := getattr(config, "query_pre_attn_scalar", None)) is not None:
        return f"query_pre_attn_scalar={scalar}", scalar**-0.5
    if (multiplier := getattr(config, "attention_multiplier", None)) is not None:
        return f"attention_multiplier={multiplier}", multiplier
    return None


def _window(config: Any, kinds: Collection[str]) -> int | None:
    """Return the sliding window of any layer."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    active = getattr(config, "use_sliding_window", True)
    return window if ("sliding_attention" in kinds if kinds else active) else None
