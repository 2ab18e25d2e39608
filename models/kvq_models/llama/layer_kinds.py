"""The layers of a model that differ from the others, as config.json names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_jax.layer.known_attention import SUPPORTED_LAYERS, WINDOWS_EVERYWHERE
from kvq_models.llama.config_fields import check_positive, optional, required
from kvq_models.llama.families import LINEAR, Family

# families besides those with a full_layer_step whose windows `layer_types` may name
_NAME_WINDOWS = ("qwen2", "qwen3", "smollm3")
# families without windows, unless `use_sliding_window` says so
_CHOOSE_WINDOWS = ("qwen2", "qwen3", "qwen3_moe")

MAX_LAYERS = 1024  # eight times the largest Llama; plans and weights are made layer by layer


def checked_layers(count: int) -> int:
    """Return a number of layers. Raise ValueError for one beyond `MAX_LAYERS`, before a list of
    them is made."""
    if count > MAX_LAYERS:
        raise ValueError(f"config field num_hidden_layers={count} must be at most {MAX_LAYERS}")
    return count


def unrotated_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose keys and queries are not rotated. transformers' `no_rope_layers` has
    a 1 for each layer that *is* rotated."""
    if hf["model_type"] == "granitemoehybrid":
        rotated = hf.get("position_embedding_type") == "rope"
        return () if rotated else tuple(range(required(hf, "num_hidden_layers", int)))
    if hf["model_type"] != "smollm3":
        return ()
    layers = checked_layers(required(hf, "num_hidden_layers", int))
    rotated = optional(hf, "no_rope_layers", list, None)
    if rotated is None:
        interval = optional(hf, "no_rope_layer_interval", int, 4)
        check_positive("no_rope_layer_interval", interval)
        rotated = [(i + 1) % interval for i in range(layers)]
    if len(rotated) != layers:
        raise ValueError(
            f"config field no_rope_layers has {len(rotated)} entries for {layers} layers"
        )
    return tuple(i for i, rotates in enumerate(rotated) if not rotates)


def sliding_window(hf: Mapping[str, Any], family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and the layers that have it.

    Returns (None, ()) if no layer uses it, or if it spans the model's context and windowed layers
    have no RoPE of their own.
    """
    layers = checked_layers(required(hf, "num_hidden_layers", int))
    window = (
        optional(hf, "sliding_window", int, None)
        if "sliding_window" in hf
        else family.sliding_window
    )
    windowed = _windowed_layers(hf, family, layers, window is not None)
    if windowed and window is None:
        raise ValueError(
            "config field sliding_window is missing, and layer_types names layers that have one"
        )
    spans = window is None or window >= required(hf, "max_position_embeddings", int)
    inactive = not windowed or (spans and family.local_rope_theta is None)
    return (None, ()) if inactive else (window, windowed)


def _windowed_layers(
    hf: Mapping[str, Any], family: Family, layers: int, has_window: bool
) -> tuple[int, ...]:
    kinds = optional(hf, "layer_types", list, None)
    if kinds is not None and len(kinds) != layers:
        raise ValueError(f"config field layer_types has {len(kinds)} entries for {layers} layers")
    if hf["model_type"] == "granitemoehybrid":
        _check_attending(kinds)
        return ()
    unknown = sorted({str(kind) for kind in kinds or ()} - set(SUPPORTED_LAYERS))
    if unknown:
        raise NotImplementedError(
            f"config field layer_types contains {', '.join(unknown)}; supported:"
            f" {', '.join(SUPPORTED_LAYERS)}"
        )
    model_type, used = hf["model_type"], optional(hf, "use_sliding_window", bool, None)
    active = used or model_type not in _CHOOSE_WINDOWS
    if model_type in WINDOWS_EVERYWHERE and has_window and active:
        return tuple(range(layers))
    named = tuple(i for i, kind in enumerate(kinds or ()) if kind == "sliding_attention")
    if named and family.full_layer_step is None and model_type not in _NAME_WINDOWS:
        raise NotImplementedError(
            f"config field layer_types contains sliding_attention, which {model_type=} does not"
            " read; supported: full_attention"
        )
    if named and used is False and model_type in _CHOOSE_WINDOWS:
        raise NotImplementedError(
            "config field layer_types contains sliding_attention, and use_sliding_window=False"
        )
    if kinds is not None:
        return named
    if family.full_layer_step is not None:
        step = optional(hf, "sliding_window_pattern", int, family.full_layer_step)
        check_positive("sliding_window_pattern", step)
        return tuple(i for i in range(layers) if (i + 1) % step)
    if used and model_type == "smollm3":
        return unrotated_layers(hf)
    if used and model_type in _NAME_WINDOWS:
        first = optional(hf, "max_window_layers", int, 28)
        if first < 0:
            raise ValueError(f"config field max_window_layers={first} must be at least 0")
        return tuple(range(first, layers))
    return ()


def _check_attending(kinds: list[Any] | None) -> None:
    """Raise NotImplementedError unless all layers of a Granite 4 attend."""
    if not kinds or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise NotImplementedError(
            f"config field layer_types has {LINEAR}; supported: attention in every layer (Granite"
            " 4's dense models)"
        )
