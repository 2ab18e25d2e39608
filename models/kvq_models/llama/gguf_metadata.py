"""The configuration of a GGUF file, in this project's terms.

GGUF (llama.cpp's format) writes sizes under its own keys, and stores rope scaling of Llama 3 as one
factor per frequency.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from kvq_models.llama import generation_defaults
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.end_tokens import end_tokens
from kvq_models.llama.gguf_families import MODEL_TYPES, REFUSED, family_fields, windows
from kvq_models.llama.gguf_fields import (
    check_all_known,
    number,
    of_all_layers,
    positive,
    text,
    token,
    whole,
)
from kvq_models.llama.gguf_header import GgufFields
from kvq_models.llama.gguf_rope import ROPE_FACTORS, llama3_rope, ropes_of
from kvq_models.llama.layer_kinds import checked_layers

CONTROL, USER_DEFINED = 3, 4  # types of tokens


def config_of(
    fields: GgufFields, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> LlamaConfig:
    """Return the model's configuration, from the file's metadata.

    shapes: of the tensors, by Hugging Face name. read: reads a tensor of frequency factors, if
    there is one. Raises ValueError for a missing or malformed field, and
    NotImplementedError for a feature that this model does not compute. Both name the field.
    """
    architecture = text(fields, "general.architecture")
    if architecture not in MODEL_TYPES:
        reason = f" ({REFUSED[architecture]})" if architecture in REFUSED else ""
        raise NotImplementedError(
            f"GGUF architecture {architecture!r} is not supported{reason}; supported:"
            f" {', '.join(MODEL_TYPES)}"
        )
    heads = positive(fields, f"{architecture}.attention.head_count")
    hidden = positive(fields, f"{architecture}.embedding_length")
    head_dim = positive(fields, f"{architecture}.attention.key_length", hidden // heads)
    check_all_known(fields, architecture, head_dim)
    partial = architecture == "phi3"
    for key in ("attention.value_length", "rope.dimension_count")[: 1 if partial else 2]:
        if (other := whole(fields, f"{architecture}.{key}", head_dim)) != head_dim:
            raise NotImplementedError(
                f"GGUF field {architecture}.{key}={other} is not supported; supported: the head dim"
                f" {head_dim}"
            )
    layers, context = "model.layers.0.", whole(fields, f"{architecture}.context_length")
    blocks = checked_layers(whole(fields, f"{architecture}.block_count"))
    window, windowed = windows(fields, architecture, blocks, context)
    rope, local_rope = ropes_of(fields, architecture, head_dim, shapes, read)
    embedding = (whole(fields, f"{architecture}.vocab_size", 0),)
    vocab_size = shapes.get("model.embed_tokens.weight", embedding)[0]
    config = LlamaConfig(
        **family_fields(fields, architecture, head_dim, hidden // heads),
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=whole(fields, f"{architecture}.feed_forward_length"),
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=of_all_layers(fields, f"{architecture}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        sliding_window=window,
        windowed_layers=windowed,
        rms_norm_eps=number(fields, f"{architecture}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="lm_head.weight" not in shapes,
        qkv_bias=f"{layers}self_attn.q_proj.bias" in shapes,
        o_bias=f"{layers}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{layers}mlp.gate_proj.bias" in shapes,
        rope=rope,
        local_rope=local_rope if windowed else None,
        bos_token_id=token(fields, "bos"),
        eos_token_ids=end_tokens(
            (token(fields, name) for name in ("eos", "eot", "eom")),
            _control_tokens(fields),
            vocab_size,
        ),
        pad_token_id=token(fields, "padding"),
        generation=generation_defaults.of_gguf(fields),
    )
    factors = read(ROPE_FACTORS) if ROPE_FACTORS in shapes else None
    if factors is None:
        return config
    return dataclasses.replace(config, rope=llama3_rope(config, factors))


def _control_tokens(fields: GgufFields) -> dict[str, int]:
    """Return the ids of the vocabulary's control tokens and of those that its user defined, except
    Gemma's </s>, which is HTML. A broken vocabulary has none, which the tokenizer will name. The
    texts of other tokens, often a hundred thousand, are not decoded."""
    kinds = fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return {}
    places = [i for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    texts = fields.texts("tokenizer.ggml.tokens", places)
    return {
        one: i
        for i, one in zip(places, texts, strict=False)
        if kinds[i] == CONTROL or one != "</s>"
    }
