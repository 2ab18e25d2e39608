"""The layers of a model that differ from the others, as config.json names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_jax.cache.known_attention import SUPPORTED_LAYERS
from kvq_models.llama.config_fields import check_positive, optional, required

MOST_LAYERS = 1024  # eight times the largest Llama; plans and weights are made layer by layer


def checked_layers(count: int) -> int:
    """Return a number of layers. Raise ValueError for one beyond `MOST_LAYERS`, before a list of
    them is made."""
    if count > MOST_LAYERS:
        raise ValueError(f"config field num_hidden_layers={count} must be at most {MOST_LAYERS}")
    return count


def unrotated_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose keys and queries are not rotated. transformers' `no_rope_layers` has
    a 1 for each layer that *is* rotated."""
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


def sliding_window(
    hf: Mapping[str, Any], default: int | None
) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and the layers that have it, or (None, ()) if no layer uses it or
    it spans the model's context."""
    layers, kinds = (
        checked_layers(required(hf, "num_hidden_layers", int)),
        optional(hf, "layer_types", list, None),
    )
    unknown = sorted({str(kind) for kind in kinds or ()} - set(SUPPORTED_LAYERS))
    if unknown:
        raise NotImplementedError(
            f"config field layer_types contains {', '.join(unknown)}; supported:"
            f" {', '.join(SUPPORTED_LAYERS)}"
        )
    window = optional(hf, "sliding_window", int, None) if "sliding_window" in hf else default
    windowed = tuple(i for i, kind in enumerate(kinds or ()) if kind == "sliding_attention")
    if hf["model_type"] in ("mistral", "mixtral"):
        windowed = tuple(range(layers)) if window is not None else windowed
    elif kinds is None and optional(hf, "use_sliding_window", bool, False):
        windowed = tuple(range(optional(hf, "max_window_layers", int, 28), layers))
    if windowed and window is None:
        raise ValueError(
            "config field sliding_window is missing, and layer_types names layers that have one"
        )
    inactive = (
        not windowed or window is None or window >= required(hf, "max_position_embeddings", int)
    )
    return (None, ()) if inactive else (window, windowed)
