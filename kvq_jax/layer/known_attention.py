"""Read the attention of each layer from a model's config, and refuse by name what this library
would get wrong.

A config of kvq_models and `CacheDims` say what their attention is. Hugging Face's configs name it
in fields that differ by family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.layer.known_heads import head_dim_of, heads_of

# families whose attention is special in a way that no field of their config says
SPECIAL_FAMILIES = {
    "deepseek_v4": "attention over compressed tokens",
    "diffllama": "the difference of two softmaxes",
    "diffusion_gemma_text": "tokens that see later ones",
    "doge": "a mask that is computed from values",
    "dory": "layers that run several times for each token",
    "embedding_gemma2_text": "tokens that see later ones",
    "esmc": "tokens that see later ones",
    "eurobert": "tokens that see later ones",
    "gemma3n_text": "layers that share keys and values",
    "gpt_neo": "local attention and another scale",
    "granite_swa": "attention sinks of another form",
    "granitemoe_swa": "attention sinks of another form",
    "jetmoe": "query heads that read KV heads in another order",
    "mimo_v2_flash": "layers of several head dims",
    "minimax_m3_vl_text": "attention over chosen blocks of tokens",
    "mllama_text_model": "layers that attend to images alone",
    "muse_glimmer_assistant": "tokens that see later ones",
    "t5gemma2_decoder": "one softmax over its own tokens and the encoder's",
    "t5gemma2_text": "tokens that see later ones",
    "ultrabert": "tokens that see later ones",
}
WITH_SINKS = ("flint", "gpt_oss")
# norms of queries and keys, or weights, take the scale's place
UNSCALED = ("dia_decoder", "gemma4_text")
# families whose sliding_window holds in all layers. Others say which layers have one
WINDOWS_EVERYWHERE = ("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


def attention_of(config: Any) -> tuple[Attention, ...]:
    """Return the attention of each layer of a model's config, or () if all are plain.

    Raise NotImplementedError, in one line that names the field, if kvq does not compute it.
    """
    layers = getattr(config, "attention", None)
    if isinstance(layers, tuple) and all(isinstance(layer, Attention) for layer in layers):
        return layers
    if reason := _unsupported(config):
        raise NotImplementedError(
            f"{reason}, which kvq does not compute: pass kvq.CacheDims in place of the config if"
            " your model sees to the difference"
        )
    scale, cap = _scale(config), _field(config, "attn_logit_softcapping")
    sinks = _field(config, "model_type") in WITH_SINKS
    layers = tuple(Attention(window, scale, cap, sinks) for window in _windows(config))
    return layers if any(layer != PLAIN for layer in layers) else ()


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _unsupported(config: Any) -> str | None:
    family, kinds = _field(config, "model_type"), _kinds(config)
    if special := SPECIAL_FAMILIES.get(family):
        return f"config field model_type={family!r} has {special}"
    if other := sorted(set(kinds) - set(SUPPORTED_LAYERS)):
        return f"config field layer_types contains {', '.join(other)}"
    if kinds and len(kinds) != config.num_hidden_layers:
        return (
            f"config field layer_types has {len(kinds)} entries for {config.num_hidden_layers}"
            " layers"
        )
    if _field(config, "alibi"):
        return "config field alibi=True adds a bias to the scores"
    if rank := _field(config, "kv_lora_rank"):
        return f"config field kv_lora_rank={rank} means that keys and values are latents"
    if shared := _field(config, "num_kv_shared_layers"):
        return f"config field num_kv_shared_layers={shared} makes layers share keys and values"
    if len(heads := set(_field(config, "num_attention_heads_per_layer") or ())) > 1:
        counts = " and ".join(map(str, sorted(heads)))
        return f"config field num_attention_heads_per_layer has {counts} query heads"
    if both := _field(config, "use_bidirectional_attention"):
        return f"config field use_bidirectional_attention={both} lets tokens see later ones"
    window = _window(config)
    if window is None and "sliding_attention" in kinds:
        return "config field layer_types names layers with a window, and sliding_window is missing"
    if window is not None and not kinds and family not in WINDOWS_EVERYWHERE:
        return f"config field sliding_window={window} does not say which layers have a window"
    return None


def _kinds(config: Any) -> Sequence[str]:
    return _field(config, "layer_types") or ()


def _window(config: Any) -> int | None:
    active = getattr(config, "use_sliding_window", True) or "sliding_attention" in _kinds(config)
    return _field(config, "sliding_window") if active else None


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer."""
    window, kinds = _window(config), _kinds(config)
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _scale(config: Any) -> float | None:
    """Return the scale of the scores, or None if it is head_dim ** -0.5."""
    if _field(config, "model_type") in UNSCALED:
        return 1.0
    if (scalar := _field(config, "query_pre_attn_scalar")) is not None:
        scale = scalar**-0.5
    else:
        scale = _field(config, "attention_multiplier")
    if scale is None or heads_of(config):  # layers of several head dims
        return scale
    return None if math.isclose(scale, head_dim_of(config) ** -0.5, rel_tol=1e-4) else scale
