"""One table that maps Hugging Face's tensor names to this model's weights, for all families and in
both directions.

torch's Linear stores [out, in] and this model [in, out], so projections are transposed. The config
alone decides which rows of the table a checkpoint must have: a weight that the model lacks (a bias,
a tied head) has no name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from kvq_jax.types.array_types import ArraySpec
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_weights import is_packed
from kvq_models.llama.tensor_names import EXPERTS, KEEP, TRANSPOSE
from kvq_models.llama.weight_axes import weight_axes

# (Hugging Face name, path in the module tree, transpose); "#" stands for the layer's number, "*"
# for the expert's: one weight holds those of all experts.
TABLE = (
    ("model.embed_tokens.weight", "embed", KEEP),
    ("model.layers.#.input_layernorm.weight", "layers.#.input_norm.scale", KEEP),
    ("model.layers.#.self_attn.q_proj.weight", "layers.#.q_proj.kernel", TRANSPOSE),
    ("model.layers.#.self_attn.q_proj.bias", "layers.#.q_proj.bias", KEEP),
    ("model.layers.#.self_attn.k_proj.weight", "layers.#.k_proj.kernel", TRANSPOSE),
    ("model.layers.#.self_attn.k_proj.bias", "layers.#.k_proj.bias", KEEP),
    ("model.layers.#.self_attn.v_proj.weight", "layers.#.v_proj.kernel", TRANSPOSE),
    ("model.layers.#.self_attn.v_proj.bias", "layers.#.v_proj.bias", KEEP),
    ("model.layers.#.self_attn.q_norm.weight", "layers.#.q_norm.scale", KEEP),
    ("model.layers.#.self_attn.k_norm.weight", "layers.#.k_norm.scale", KEEP),
    ("model.layers.#.self_attn.o_proj.weight", "layers.#.o_proj.kernel", TRANSPOSE),
    ("model.layers.#.self_attn.o_proj.bias", "layers.#.o_proj.bias", KEEP),
    ("model.layers.#.self_attn.sinks", "layers.#.sinks", KEEP),
    ("model.layers.#.post_attention_layernorm.weight", "layers.#.mlp_norm.scale", KEEP),
    ("model.layers.#.mlp.gate_proj.weight", "layers.#.mlp.gate_proj.kernel", TRANSPOSE),
    ("model.layers.#.mlp.gate_proj.bias", "layers.#.mlp.gate_proj.bias", KEEP),
    ("model.layers.#.mlp.up_proj.weight", "layers.#.mlp.up_proj.kernel", TRANSPOSE),
    ("model.layers.#.mlp.up_proj.bias", "layers.#.mlp.up_proj.bias", KEEP),
    ("model.layers.#.mlp.down_proj.weight", "layers.#.mlp.down_proj.kernel", TRANSPOSE),
    ("model.layers.#.mlp.down_proj.bias", "layers.#.mlp.down_proj.bias", KEEP),
    ("model.norm.weight", "norm.scale", KEEP),
    ("lm_head.weight", "head.kernel", TRANSPOSE),
)
# The same names stand for other norms in families that norm what is added to the residual stream.
WITH_OUTPUT_NORMS = {
    "layers.#.attention_output_norm.scale": "model.layers.#.post_attention_layernorm.weight",
    "layers.#.mlp_norm.scale": "model.layers.#.pre_feedforward_layernorm.weight",
    "layers.#.mlp_output_norm.scale": "model.layers.#.post_feedforward_layernorm.weight",
}

# Buffers of old checkpoints that the config determines: rotary frequencies.
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")

_BY_PATH = {path: (name, transpose) for name, path, transpose in TABLE}
_BY_PATH_WITH_OUTPUT_NORMS = _BY_PATH | {p: (n, KEEP) for p, n in WITH_OUTPUT_NORMS.items()}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a model under its Hugging Face name. `leaf` and `spec` are in this model's
    orientation. If the name has a "*", checkpoints store a tensor for each expert."""

    name: str
    transpose: bool
    leaf: Any  # jax.Array, a packed weight, or jax.ShapeDtypeStruct in an abstract model
    spec: ArraySpec

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors that a checkpoint stores for this weight."""
        if "*" not in self.name:
            return (self.name,)
        return tuple(self.name.replace("*", str(i)) for i in range(self.spec.shape[0]))

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Return the shape of each tensor that a checkpoint must store."""
        shape = self.spec.shape[1:] if "*" in self.name else self.spec.shape
        return shape[::-1] if self.transpose else shape


def weights(llama: Llama) -> dict[str, Weight]:
    """Return the weights of a model (or of an abstract one) by path, in its pytree's order, without
    parameters of cache methods."""
    return {path: _weight(path, leaf, llama.config) for path, leaf in _leaves(llama)}


def describe(llama: Llama) -> Llama:
    """Return the same tree with an `ArraySpec` for each weight."""
    return replace_weights(llama, {path: weight.spec for path, weight in weights(llama).items()})


def replace_weights(llama: Llama, values: Mapping[str, Any]) -> Llama:
    """Return the same tree with other values at the paths of `weights(llama)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(path_name(path), leaf), llama, is_leaf=is_packed
    )


def _weight(path: str, leaf: Any, config: LlamaConfig) -> Weight:
    layer = re.search(r"\d+", path)
    by_path = _BY_PATH_WITH_OUTPUT_NORMS if config.norms_outputs else _BY_PATH
    if config.experts is not None:
        by_path = by_path | {p: (n, t) for n, p, t in EXPERTS[config.model_type]}
    name, transpose = by_path[re.sub(r"\d+", "#", path)]
    spec = ArraySpec(weight_axes(path, config), leaf.dtype.name)
    return Weight(name.replace("#", layer.group()) if layer else name, transpose, leaf, spec)


def _leaves(llama: Llama) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(llama, is_leaf=is_packed):
        name = path_name(path)
        if not name.startswith("cache_parameters"):
            yield name, leaf


def path_name(path: jax.tree_util.KeyPath) -> str:
    """Return a path such as `layers.0.q_proj.kernel`, without the trailing key inside flax's
    Param."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
