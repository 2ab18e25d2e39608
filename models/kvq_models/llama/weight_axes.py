"""The axes of every weight of a Llama by its path in the module tree: one table, like the table of
names in hf_names.py.

A projection's output axis is as long as its heads together: Axis("kv_heads", K, each=H) has K * H
entries, H neighbours for each head.
"""

from __future__ import annotations

import math
import re

from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import Axis
from kvq_models.llama.config import LlamaConfig

# "#" stands for the layer's number.
TABLE = {
    "embed": ("vocab", "model"),
    "layers.#.input_norm.scale": ("model",),
    "layers.#.q_proj.kernel": ("model", "heads"),
    "layers.#.q_proj.bias": ("heads",),
    "layers.#.k_proj.kernel": ("model", "kv_heads"),
    "layers.#.k_proj.bias": ("kv_heads",),
    "layers.#.v_proj.kernel": ("model", "kv_heads"),
    "layers.#.v_proj.bias": ("kv_heads",),
    "layers.#.q_norm.scale": ("q_norm",),
    "layers.#.k_norm.scale": ("k_norm",),
    "layers.#.o_proj.kernel": ("heads", "model"),
    "layers.#.o_proj.bias": ("model",),
    "layers.#.sinks": ("query_heads",),
    "layers.#.attention_output_norm.scale": ("model",),
    "layers.#.mlp_norm.scale": ("model",),
    "layers.#.mlp_output_norm.scale": ("model",),
    "layers.#.mlp.gate_proj.kernel": ("model", "mlp"),
    "layers.#.mlp.gate_proj.bias": ("mlp",),
    "layers.#.mlp.up_proj.kernel": ("model", "mlp"),
    "layers.#.mlp.up_proj.bias": ("mlp",),
    "layers.#.mlp.down_proj.kernel": ("mlp", "model"),
    "layers.#.mlp.down_proj.bias": ("model",),
    "layers.#.mlp.router": ("model", "choices"),
    "layers.#.mlp.gate": ("experts", "model", "expert_mlp"),
    "layers.#.mlp.up": ("experts", "model", "expert_mlp"),
    "layers.#.mlp.down": ("experts", "expert_mlp", "model"),
    "layers.#.mlp.router_bias": ("choices",),
    "layers.#.mlp.gate_bias": ("experts", "expert_mlp"),
    "layers.#.mlp.up_bias": ("experts", "expert_mlp"),
    "layers.#.mlp.down_bias": ("experts", "model"),
    "norm.scale": ("model",),
    "head.kernel": ("model", "vocab"),
}


def weight_axes(path: str, config: LlamaConfig) -> tuple[Axis, ...]:
    """Return the axes of the weight at a path such as `layers.0.q_proj.kernel`."""
    heads = Axis("heads", config.num_attention_heads, each=config.head_dim)
    kv_heads = Axis("kv_heads", config.num_key_value_heads, each=config.head_dim)
    channels, together = Axis("channels", config.head_dim), config.joint_qk_norm
    named = {
        "vocab": Axis("vocab", config.vocab_size),
        "model": Axis("model", config.hidden_size),
        "heads": heads,
        "query_heads": Axis("heads", config.num_attention_heads),
        "kv_heads": kv_heads,
        "q_norm": heads if together else channels,
        "k_norm": kv_heads if together else channels,
        "mlp": Axis("mlp", config.intermediate_size),
    }
    if config.experts is not None:
        named["experts"] = Axis("experts", config.experts.count)
        named["choices"] = Axis("none", config.experts.count)  # every device routes
        named["expert_mlp"] = Axis("mlp", config.experts.intermediate_size)
    return tuple(named[name] for name in TABLE[re.sub(r"\d+", "#", path)])


def split_by(size: int, placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes that split a weight's axis of this size: all except the rows axis, or
    none if they do not divide it."""
    axes = tuple(axis for axis in (placement.heads, placement.tokens) if axis is not None)
    parts = math.prod(placement.mesh.shape[axis] for axis in axes)
    return axes if parts > 1 and size % parts == 0 else ()
