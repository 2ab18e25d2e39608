"""Tensor names of GGUF files, and the order in which they store the rows of projections.

llama.cpp names tensors by block. Under the same names, architectures store the weights of other
Hugging Face modules (OLMo 2's norms of outputs), and all experts of a layer are one tensor. Where
llama.cpp's RoPE rotates neighbouring channels (2i, 2i + 1) instead of Hugging Face's halves
(i, i + H/2), the rows of the query and key projections are stored in that order.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

import numpy as np

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.experts_config import MAX_EXPERTS
from kvq_models.llama.gguf_header import GgufTensor
from kvq_models.llama.stored_tensor import CheckpointError
from kvq_models.llama.tensor_names import EXPERTS

# (Hugging Face name, GGUF name); "#" stands for the layer's number, "*" for the expert's.
TENSORS = (
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.layers.#.input_layernorm.weight", "blk.#.attn_norm.weight"),
    ("model.layers.#.self_attn.q_proj.weight", "blk.#.attn_q.weight"),
    ("model.layers.#.self_attn.q_proj.bias", "blk.#.attn_q.bias"),
    ("model.layers.#.self_attn.k_proj.weight", "blk.#.attn_k.weight"),
    ("model.layers.#.self_attn.k_proj.bias", "blk.#.attn_k.bias"),
    ("model.layers.#.self_attn.v_proj.weight", "blk.#.attn_v.weight"),
    ("model.layers.#.self_attn.v_proj.bias", "blk.#.attn_v.bias"),
    ("model.layers.#.self_attn.q_norm.weight", "blk.#.attn_q_norm.weight"),
    ("model.layers.#.self_attn.k_norm.weight", "blk.#.attn_k_norm.weight"),
    ("model.layers.#.self_attn.o_proj.weight", "blk.#.attn_output.weight"),
    ("model.layers.#.self_attn.o_proj.bias", "blk.#.attn_output.bias"),
    ("model.layers.#.post_attention_layernorm.weight", "blk.#.ffn_norm.weight"),
    ("model.layers.#.mlp.gate_proj.weight", "blk.#.ffn_gate.weight"),
    ("model.layers.#.mlp.gate_proj.bias", "blk.#.ffn_gate.bias"),
    ("model.layers.#.mlp.up_proj.weight", "blk.#.ffn_up.weight"),
    ("model.layers.#.mlp.up_proj.bias", "blk.#.ffn_up.bias"),
    ("model.layers.#.mlp.down_proj.weight", "blk.#.ffn_down.weight"),
    ("model.layers.#.mlp.down_proj.bias", "blk.#.ffn_down.bias"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
)
OUTPUT_NORMS = {
    "blk.#.post_attention_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "blk.#.post_ffw_norm.weight": "model.layers.#.post_feedforward_layernorm.weight",
}
# Names that an architecture uses for other tensors than Llama's, or not at all (None).
_CHANGED: dict[str, Mapping[str, str | None]] = {
    "olmo2": {"blk.#.attn_norm.weight": None, "blk.#.ffn_norm.weight": None} | OUTPUT_NORMS,
    "gemma2": OUTPUT_NORMS
    | {"blk.#.ffn_norm.weight": "model.layers.#.pre_feedforward_layernorm.weight"},
    "phi3": {
        "blk.#.attn_qkv.weight": "model.layers.#.self_attn.qkv_proj.weight",
        "blk.#.ffn_up.weight": "model.layers.#.mlp.gate_up_proj.weight",
    },
    "gpt-oss": {
        "blk.#.ffn_norm.weight": None,
        "blk.#.post_attention_norm.weight": "model.layers.#.post_attention_layernorm.weight",
        "blk.#.attn_sinks.weight": "model.layers.#.self_attn.sinks",
        "blk.#.ffn_gate_inp.weight": "model.layers.#.mlp.router.weight",
        "blk.#.ffn_gate_inp.bias": "model.layers.#.mlp.router.bias",
    }
    | {
        f"blk.#.ffn_{name}_exps.{kind}": f"model.layers.#.mlp.experts.{name}_proj{end}"
        for name in ("gate", "up", "down")
        for kind, end in (("weight", ""), ("bias", "_bias"))
    },
}
_CHANGED["gemma3"] = _CHANGED["gemma2"]
# In the order of tensor_names.EXPERTS.
_STACKED = tuple(
    f"blk.#.ffn_{name}.weight" for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")
)
# model types; the others rotate halves
_SWAPPED = ("llama", "mistral", "ministral3", "mixtral", "granite", "smollm3")


@functools.cache
def _table(architecture: str) -> dict[str, str]:
    """Return the Hugging Face names of an architecture's tensors. Files from before April 2024 hold
    each expert as a tensor of its own."""
    changed = {**{gguf: hf for hf, gguf in TENSORS}, **_CHANGED.get(architecture, {})}
    names = {gguf: hf for gguf, hf in changed.items() if hf is not None}
    family = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}.get(architecture)
    for gguf, (hf, *_) in zip(_STACKED, EXPERTS.get(family or "", ()), strict=False):
        names |= {gguf: hf, gguf.replace("_exps.", ".*."): hf}
    return names


def named(tensor: GgufTensor, architecture: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a file's tensor with its Hugging Face name, or with its own if it has none. A tensor of
    all experts is yielded as the experts' tensors, which are parts of it in place."""
    table, name = _table(architecture), tensor.name
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(\d+))?\.(weight|bias)", name)
    if match is None:
        yield name, tensor
        return
    layer, stem, expert, kind = match.groups()
    block, each = "" if layer is None else "blk.#.", "" if expert is None else ".*"
    hf = table.get(f"{block}{stem}{each}.{kind}", name).replace("#", layer or "#")
    if expert is not None:
        yield hf.replace("*", expert), tensor
    elif "*" in hf:
        for i in range(_expert_count(tensor)):
            part = dataclasses.replace(tensor, shape=tensor.shape[1:], part=i)
            yield hf.replace("*", str(i)), part
    else:
        yield hf, tensor


def _expert_count(tensor: GgufTensor) -> int:
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
        raise CheckpointError(
            f"{str(tensor.file)!r} holds tensor {tensor.name!r} of shape {tensor.shape}, which is"
            f" not a stack of matrices of at most {MAX_EXPERTS} experts"
        )
    return tensor.shape[0]


def swapped_heads(config: LlamaConfig, hf_tensor: str) -> int:
    """Return the number of heads whose rows GGUF reorders in this tensor (by its Hugging Face
    name), or 0 if it reorders none."""
    if config.model_type not in _SWAPPED:
        return 0
    if ".self_attn.q_proj." in hf_tensor:
        return config.num_attention_heads
    return config.num_key_value_heads if ".self_attn.k_proj." in hf_tensor else 0


def in_hf_form(config: LlamaConfig, name: str, tensor: np.ndarray) -> np.ndarray:
    """Return a tensor in Hugging Face's orientation, order of rows and offset of norms."""
    if heads := swapped_heads(config, name):
        return unswapped(tensor, heads)
    if config.unit_offset_norms and name.endswith("norm.weight"):
        return tensor - np.float32(1)  # llama.cpp multiplies by 1 + weight as it is stored
    return np.swapaxes(tensor, -1, -2) if is_transposed(name) else tensor


def is_transposed(name: str) -> bool:
    """Return True for a matrix of all experts that Hugging Face stores as [experts, in, out], and
    GGUF like any other."""
    return ".experts." in name and name.endswith("_proj")


def unswapped(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection [heads * H, ...] with the rows of each head in Hugging Face's order, from
    pairs (2i, 2i + 1) to halves."""
    rows = tensor.shape[0] // heads
    return (
        tensor.reshape(heads, rows // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )
