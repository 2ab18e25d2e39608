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
from typing import Any

import numpy as np

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.rope import rope_for
from kvq_models.llama.rope_config import RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama
ROPE_FACTORS = "rope_freqs.weight"

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
_HF_NAMES = {gguf: hf for hf, gguf in TENSORS}

Fields = Mapping[str, Any]


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
    architecture = _text(fields, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise NotImplementedError(
            f"GGUF architecture {architecture!r} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(fields, architecture)
    heads, hidden = (
        _whole(fields, f"{architecture}.attention.head_count"),
        _whole(fields, f"{architecture}.embedding_length"),
    )
    if heads < 1 or hidden < 1:
        raise ValueError(
            f"GGUF fields head_count={heads} and embedding_length={hidden} must be positive"
        )
    head_dim = _whole(fields, f"{architecture}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := _whole(fields, f"{architecture}.{key}", head_dim)) != head_dim:
            raise NotImplementedError(
                f"GGUF field {architecture}.{key}={other} is not supported; supported: the head dim"
                f" {head_dim}"
            )
    layers, context = "model.layers.0.", _whole(fields, f"{architecture}.context_length")
    window, blocks = (
        _whole(fields, f"{architecture}.attention.sliding_window", 0),
        _whole(fields, f"{architecture}.block_count"),
    )
    windowed = 0 < window < context
    config = LlamaConfig(
        model_type=architecture,
        vocab_size=shapes.get(
            "model.embed_tokens.weight", (_whole(fields, f"{architecture}.vocab_size", 0),)
        )[0],
        hidden_size=hidden,
        intermediate_size=_whole(fields, f"{architecture}.feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=_whole(fields, f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        sliding_window=window if windowed else None,
        windowed_layers=tuple(range(blocks)) if windowed else (),
        rms_norm_eps=_number(fields, f"{architecture}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="lm_head.weight" not in shapes,
        qkv_bias=f"{layers}self_attn.q_proj.bias" in shapes,
        o_bias=f"{layers}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{layers}mlp.gate_proj.bias" in shapes,
        qk_norm=f"{layers}self_attn.k_norm.weight" in shapes,
        rope=_rope(fields, architecture),
        bos_token_id=_token(fields, "bos"),
        eos_token_ids=tuple(
            dict.fromkeys(
                i for i in (_token(fields, "eos"), _token(fields, "eot")) if i is not None
            )
        ),
        pad_token_id=_token(fields, "padding"),
    )
    factors = rope_factors() if ROPE_FACTORS in shapes else None
    return (
        config
        if factors is None
        else dataclasses.replace(config, rope=_llama3_rope(config, factors))
    )


def _refuse_unsupported(fields: Fields, architecture: str) -> None:
    if experts := _whole(fields, f"{architecture}.expert_count", 0):
        raise NotImplementedError(
            f"GGUF field {architecture}.expert_count={experts} is not supported; supported: no"
            " mixture of experts"
        )


def _rope(fields: Fields, architecture: str) -> RopeConfig:
    theta = _number(fields, f"{architecture}.rope.freq_base", 1e4)
    scaling = f"{architecture}.rope.scaling"
    kind = fields.get(f"{scaling}.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise NotImplementedError(
            f"GGUF field {scaling}.type={kind!r} is not supported; supported: none, linear, yarn"
        )
    factor = _number(fields, f"{scaling}.factor")
    if kind == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    original = _whole(
        fields,
        f"{scaling}.original_context_length",
        round(_whole(fields, f"{architecture}.context_length") / factor),
    )
    fast, slow = (
        _number(fields, f"{scaling}.yarn_beta_fast", 32.0),
        _number(fields, f"{scaling}.yarn_beta_slow", 1.0),
    )
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
    )


def _llama3_rope(config: LlamaConfig, factors: np.ndarray) -> RopeConfig:
    """Return Llama 3's rescaling from the quotients of frequencies [H/2] that the file stores.
    Raise NotImplementedError for any other rescaling."""
    largest = float(factors.max(initial=1.0))
    if (
        config.rope.rope_type != "default"
        or factors.shape != (config.head_dim // 2,)
        or not 1 < largest < 2**20
    ):
        raise NotImplementedError(
            f"GGUF tensor {ROPE_FACTORS!r} of shape {factors.shape} is not Llama 3's rescaling of"
            " RoPE"
        )
    # every published Llama 3.x has these factors and this original context
    rope = RopeConfig(
        rope_type="llama3",
        theta=config.rope.theta,
        factor=round(largest, 3),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain, rescaled = (
        np.asarray(rope_for(c, 1).inverse_frequencies)
        for c in (config, dataclasses.replace(config, rope=rope))
    )
    if not np.allclose(plain / rescaled, factors, rtol=1e-4, atol=0):
        raise NotImplementedError(
            f"GGUF tensor {ROPE_FACTORS!r} is not Llama 3's rescaling of RoPE by {rope.factor:g}"
        )
    return rope


def _value(fields: Fields, key: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = fields.get(key, default)
    if value is None:
        raise ValueError(f"GGUF field {key} is missing")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"GGUF field {key}={str(value)[:40]!r} is of the wrong type")
    return value


def _text(fields: Fields, key: str) -> str:
    return _value(fields, key, str, None)


def _whole(fields: Fields, key: str, default: int | None = None) -> int:
    return _value(fields, key, int, default)


def _number(fields: Fields, key: str, default: float | None = None) -> float:
    # the decimal that was written: float32 stores 1e-5 as 9.99999975e-06
    return float(str(np.float32(_value(fields, key, (int, float), default))))


def _token(fields: Fields, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return _whole(fields, key) if key in fields else None
