"""The configuration and the tensor names of a GGUF file, in this project's terms.

GGUF (llama.cpp's format) writes sizes under its own keys, names tensors by block, and stores rope
scaling of Llama 3 as one factor per frequency. For architecture `llama` it also reorders the rows
of the query and key projections, because its RoPE rotates neighbouring channels (2i, 2i + 1) while
Hugging Face's rotates halves (i, i + H/2).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np

from kvq_models.llama import generation_defaults
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.end_tokens import end_tokens
from kvq_models.llama.gguf_fields import Fields, check_all_known, number, text, token, whole
from kvq_models.llama.gguf_rope import ROPE_FACTORS, llama3_rope, rope_of

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama

# (Hugging Face name, GGUF name); "#" stands for the layer's number.
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
CONTROL, USER_DEFINED = 3, 4  # types of tokens
_HF_NAMES = {gguf: hf for hf, gguf in TENSORS}


def hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, or None if it has none."""
    block = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
    if block is None:
        return _HF_NAMES.get(name)
    pattern = _HF_NAMES.get(f"blk.#.{block[2]}")
    return None if pattern is None else pattern.replace("#", block[1])


def has_swapped_rows(config: LlamaConfig, hf_tensor: str) -> int:
    """Return the number of heads whose rows GGUF reorders in this tensor (by its Hugging Face
    name), or 0 if it reorders none."""
    if config.model_type != "llama":
        return 0
    if ".self_attn.q_proj." in hf_tensor:
        return config.num_attention_heads
    return config.num_key_value_heads if ".self_attn.k_proj." in hf_tensor else 0


def unswapped(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection [heads * H, ...] with the rows of each head in Hugging Face's order, from
    pairs (2i, 2i + 1) to halves."""
    rows = tensor.shape[0] // heads
    return (
        tensor.reshape(heads, rows // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def config_of(
    fields: Fields, shapes: Mapping[str, tuple[int, ...]], rope_factors: Callable[[], np.ndarray]
) -> LlamaConfig:
    """Return the model's configuration, from the file's metadata.

    shapes: of the tensors, by Hugging Face name. rope_factors: reads the tensor of frequency
    factors, if there is one. Raises ValueError for a missing or malformed field, and
    NotImplementedError for a feature that this model does not compute. Both name the field.
    """
    architecture = text(fields, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise NotImplementedError(
            f"GGUF architecture {architecture!r} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}"
        )
    heads, hidden = (
        whole(fields, f"{architecture}.attention.head_count"),
        whole(fields, f"{architecture}.embedding_length"),
    )
    if heads < 1 or hidden < 1:
        raise ValueError(
            f"GGUF fields head_count={heads} and embedding_length={hidden} must be positive"
        )
    head_dim = whole(fields, f"{architecture}.attention.key_length", hidden // heads)
    check_all_known(fields, architecture, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := whole(fields, f"{architecture}.{key}", head_dim)) != head_dim:
            raise NotImplementedError(
                f"GGUF field {architecture}.{key}={other} is not supported; supported: the head dim"
                f" {head_dim}"
            )
    layers, context = "model.layers.0.", whole(fields, f"{architecture}.context_length")
    window, blocks = (
        whole(fields, f"{architecture}.attention.sliding_window", 0),
        whole(fields, f"{architecture}.block_count"),
    )
    windowed = 0 < window < context
    config = LlamaConfig(
        model_type=architecture,
        vocab_size=shapes.get(
            "model.embed_tokens.weight", (whole(fields, f"{architecture}.vocab_size", 0),)
        )[0],
        hidden_size=hidden,
        intermediate_size=whole(fields, f"{architecture}.feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=whole(fields, f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        sliding_window=window if windowed else None,
        windowed_layers=tuple(range(blocks)) if windowed else (),
        rms_norm_eps=number(fields, f"{architecture}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="lm_head.weight" not in shapes,
        qkv_bias=f"{layers}self_attn.q_proj.bias" in shapes,
        o_bias=f"{layers}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{layers}mlp.gate_proj.bias" in shapes,
        qk_norm=f"{layers}self_attn.k_norm.weight" in shapes,
        rope=rope_of(fields, architecture),
        bos_token_id=token(fields, "bos"),
        eos_token_ids=end_tokens(
            (token(fields, name) for name in ("eos", "eot", "eom")), _control_tokens(fields)
        ),
        pad_token_id=token(fields, "padding"),
        generation=generation_defaults.of_gguf(fields),
    )
    factors = rope_factors() if ROPE_FACTORS in shapes else None
    return (
        config
        if factors is None
        else dataclasses.replace(config, rope=llama3_rope(config, factors))
    )


def _control_tokens(fields: Fields) -> dict[str, int]:
    """Return the ids of the vocabulary's control tokens and of those that its user defined. A
    broken vocabulary has none, which the tokenizer will name."""
    tokens = fields.get("tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return {}
    return {
        one: i
        for i, (one, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
