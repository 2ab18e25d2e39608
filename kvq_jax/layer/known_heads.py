"""Read the KV heads and the head dim of each layer from a model's config, if they differ (Gemma 4).

Hugging Face's configs raise an error of their own if such a field is read from the whole model.
"""

from __future__ import annotations

from typing import Any

OWN = frozenset(["head_dim", "num_key_value_heads"])
# fields that a cache reads from the whole model
OF_ALL_LAYERS = frozenset(
    [
        "num_attention_heads",
        "hidden_size",
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
        "attention_multiplier",
    ]
)


def head_dim_of(config: Any) -> int:
    """Return the channels of a head. Configs without a head_dim (Qwen2Config), or with None
    (MixtralConfig), share the width out to the query heads."""
    given = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if given is None else given


def heads_of(config: Any) -> tuple[tuple[int, int], ...]:
    """Return (K, H) of each layer, or () if all layers are alike.

    Raise NotImplementedError, in one line that names the field, if layers differ in anything else
    that a cache depends on.
    """
    differing = frozenset(getattr(config, "per_layer_attributes", None) or ())
    if others := sorted(differing & OF_ALL_LAYERS):
        raise NotImplementedError(
            f"config field {others[0]} differs by layer, which kvq does not compute: pass"
            " kvq.CacheDims in place of the config if your model sees to the difference"
        )
    if differing & OWN:
        return tuple(
            (int(layer.num_key_value_heads), int(layer.head_dim))
            for layer in config.per_layer_config
        )
    if (of_global := getattr(config, "global_head_dim", None)) is None:
        return ()
    shared = getattr(config, "attention_k_eq_v", False)
    kv_heads = shared and getattr(config, "num_global_key_value_heads", None)
    windowed = int(config.num_key_value_heads), int(config.head_dim)
    full = int(kv_heads or config.num_key_value_heads), int(of_global)
    return tuple(full if kind == "full_attention" else windowed for kind in config.layer_types)
