"""The fields of a GGUF file: typed access, and the rule that no field that changes the computation
is ignored.

Every field of the architecture is read, harmless, neutral at its value, or refused by name. What a
field is may depend on the architecture: only Granite reads its factors, and only for Granite does
rope.scaling.finetuned decide whether RoPE is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]

# Read by gguf_metadata.py and gguf_rope.py, for every architecture.
READ = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)

# Keys of these fields, and of those that families add, by their names in the configuration.
CONFIG_NAMES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "attention_factor": "rope.scaling.attn_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "experts.count": "expert_count",
    "experts.per_token": "expert_used_count",
    "experts.intermediate_size": "expert_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attention_soft_cap": "attn_logit_softcapping",
    "logits_soft_cap": "final_logit_softcapping",
}

# Read by gguf_families.py and gguf_rope.py.
_PATTERN = ("attention.sliding_window_pattern", "rope.freq_base_swa")
READ_BY = {
    "llama": frozenset({"expert_count", "expert_used_count"}),
    "mistral3": frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    "qwen3moe": frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
    "granite": frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    "olmo2": frozenset(_PATTERN),
    "gemma2": frozenset({"attn_logit_softcapping", "final_logit_softcapping", *_PATTERN}),
    "gemma3": frozenset({"attn_logit_softcapping", "final_logit_softcapping", *_PATTERN}),
    "gpt-oss": frozenset(
        {"expert_count", "expert_used_count", "expert_feed_forward_length", *_PATTERN}
    ),
}

# These change nothing here: notes on how the file was made, or on uses other than logits.
HARMLESS = frozenset(
    {
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "pooling_type",
        "expert_used_count",
        "attention.layer_norm_epsilon",
    }
)
# Granite 4's dense models are converted as hybrids, of which they have no other layers.
_OF_HYBRIDS = {
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
}
# A text's tokens have one position, and no images that layers could add.
_OF_IMAGES = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
HARMLESS_BY = {
    "granite": frozenset(_OF_HYBRIDS),
    "qwen2vl": _OF_IMAGES,
    "qwen3vl": _OF_IMAGES,
}

# These change nothing at these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_feed_forward_length": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.output_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
NEUTRAL_BY: dict[str, dict[str, tuple[Any, ...]]] = {
    "granite": {"rope.scaling.finetuned": (True,)},
}


def check_all_known(fields: Fields, architecture: str, head_dim: int) -> None:
    """Raise NotImplementedError, by name, for a field of the architecture that may change the
    computation and is not computed."""
    known = READ | HARMLESS
    known |= READ_BY.get(architecture, frozenset()) | HARMLESS_BY.get(architecture, frozenset())
    for field in fields:
        if not field.startswith(f"{architecture}."):
            continue
        name = field.removeprefix(f"{architecture}.")
        neutral = NEUTRAL_BY.get(architecture, {}).get(name)
        if neutral is None and name in known:
            continue
        value, neutral = fields[field], neutral or NEUTRAL.get(name)
        if name == "attention.scale":
            neutral = (0, np.float32(1 / math.sqrt(head_dim)))
        if neutral is None:
            raise NotImplementedError(
                f"GGUF field {field}={str(value)[:40]} is not known here, and may change what the"
                " model computes"
            )
        if value not in neutral:
            raise NotImplementedError(
                f"GGUF field {field}={str(value)[:40]} is not supported; supported: {neutral[-1]}"
            )


def text(fields: Fields, key: str, default: str | None = None) -> str:
    return _value(fields, key, str, default)


def whole(fields: Fields, key: str, default: int | None = None) -> int:
    return _value(fields, key, int, default)


def positive(fields: Fields, key: str, default: int | None = None) -> int:
    if (value := whole(fields, key, default)) < 1:
        raise ValueError(f"GGUF field {key}={value} must be at least 1")
    return value


def of_all_layers(fields: Fields, key: str, default: int) -> int:
    """Return a number that the file states once or for every layer. Raise NotImplementedError if
    layers differ."""
    if not isinstance(stated := fields.get(key), list):
        return whole(fields, key, default)
    if not stated or any(one != stated[0] for one in stated):
        raise NotImplementedError(f"GGUF field {key} differs by layer; supported: one for all")
    return whole({key: stated[0]}, key)


def number(fields: Fields, key: str, default: float | None = None) -> float:
    # the decimal that was written: float32 stores 1e-5 as 9.99999975e-06
    return float(str(np.float32(_value(fields, key, (int, float), default))))


def token(fields: Fields, name: str) -> int | None:
    """Return the id of a special token (bos, eos, ...), or None if the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    return whole(fields, key) if key in fields else unnamed_token(fields, name)


def unnamed_token(fields: Fields, name: str) -> int | None:
    """Return the id of a special token that the file does not name: as in llama.cpp, SentencePiece
    vocabularies begin with <unk>, <s> and </s>."""
    sentence_piece = fields.get("tokenizer.ggml.model") == "llama"
    return {"bos": 1, "eos": 2}.get(name) if sentence_piece else None


def _value(fields: Fields, key: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    value = fields.get(key, default)
    if value is None:
        raise ValueError(f"GGUF field {key} is missing")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"GGUF field {key}={str(value)[:40]!r} is of the wrong type")
    return value
