"""The families of GGUF files: experts, factors, norms of outputs, and layers without RoPE."""

from __future__ import annotations

from typing import Any

from kvq_models.llama.experts_config import ExpertsConfig
from kvq_models.llama.families import GEMMA4, LINEAR, LLAMA4
from kvq_models.llama.gguf_fields import Fields, number, positive, whole

# The model_type of each architecture. Files of Mistral and Mixtral say llama.
MODEL_TYPES = {
    "llama": "llama",
    "mistral3": "ministral3",  # or mistral, if its queries are not scaled
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3",
    "qwen3moe": "qwen3_moe",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",  # or olmo3, if it has windows
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt-oss": "gpt_oss",
}
# Architectures that people ask for, with the parts that are missing here.
REFUSED = {
    "llama4": LLAMA4,
    "gemma4": GEMMA4,
    "qwen3next": LINEAR,
    "qwen35": LINEAR,
    "qwen35moe": LINEAR,
    "granitehybrid": LINEAR,
}
_UNROTATED_STEP = 4  # every fourth layer of smollm3; llama.cpp reads it from no field


_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models
# every n-th layer has no window; llama.cpp writes this into few files
_FULL_LAYER_STEP = {"olmo2": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2}


def windows(
    fields: Fields, architecture: str, layers: int, context: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and the layers that have it, or (None, ()). Raises
    NotImplementedError for another pattern of layers than llama.cpp takes for the architecture."""
    default = 4096 if architecture == "gemma2" else 0
    window = whole(fields, f"{architecture}.attention.sliding_window", default)
    step = _FULL_LAYER_STEP.get(architecture)
    windowed = tuple(i for i in range(layers) if step is None or (i + 1) % step)
    stated = fields.get(f"{architecture}.attention.sliding_window_pattern", step)
    if stated not in (step, [i in windowed for i in range(layers)]):
        raise NotImplementedError(
            f"GGUF field {architecture}.attention.sliding_window_pattern={str(stated)[:40]} is not"
            f" supported; supported: {step}"
        )
    # of architectures with a pattern, some have another RoPE in windowed layers
    active = window > 0 and (window < context or step is not None)
    return (window, windowed) if active and windowed else (None, ())


def family_fields(
    fields: Fields, architecture: str, head_dim: int, width_per_head: int
) -> dict[str, Any]:
    """Return the fields of `LlamaConfig` that tell the families apart. Raises ValueError for a
    missing or malformed field."""
    family: dict[str, Any] = {"model_type": MODEL_TYPES[architecture]}
    if architecture in ("qwen3", "qwen3vl", "qwen3moe", "olmo2", "gemma3"):
        family["qk_norm"] = True
    match architecture:
        case "llama" if experts := _experts(fields, architecture):
            family |= {"model_type": "mixtral", "experts": experts}
        case "mistral3" if not fields.get("mistral3.attention.temperature_scale"):
            family["model_type"] = "mistral"
        case "qwen3moe":
            family["experts"] = _experts(fields, architecture)
        case "granite":
            family |= _granite(fields, head_dim)
        case "olmo2":
            family |= {"joint_qk_norm": True, "norms_inputs": False, "norms_outputs": True}
            if whole(fields, "olmo2.attention.sliding_window", 0):
                family["model_type"] = "olmo3"
        case "gemma2" | "gemma3":
            family |= _gemma(fields, architecture, head_dim, width_per_head)
        case "gpt-oss":
            family |= {"attention_sinks": True, "experts": _experts(fields, architecture)}
        case "smollm3":
            blocks = whole(fields, f"{architecture}.block_count")
            family["unrotated_layers"] = tuple(range(_UNROTATED_STEP - 1, blocks, _UNROTATED_STEP))
    return family


def _experts(fields: Fields, architecture: str) -> ExpertsConfig | None:
    """Return the experts, or None if there are none.

    llama.cpp takes a missing expert_feed_forward_length of qwen3moe for the MLP's width divided by
    the experts of a token, and divides the weights of a token's experts by their sum.
    """
    count = whole(fields, f"{architecture}.expert_count", 0)
    if count == 0 and architecture == "llama":
        return None
    per_token = whole(fields, f"{architecture}.expert_used_count")
    size = positive(fields, f"{architecture}.feed_forward_length")
    if architecture == "gpt-oss":
        size = whole(fields, f"{architecture}.expert_feed_forward_length")
        return ExpertsConfig(
            count, per_token, size, biased=True, swiglu_limit=7.0, swiglu_alpha=1.702
        )
    if architecture == "qwen3moe":
        each = whole(fields, f"{architecture}.expert_feed_forward_length", 0)
        size = each or size // max(per_token, 1)
    return ExpertsConfig(count, per_token, size)


def _gemma(fields: Fields, architecture: str, head_dim: int, width_per_head: int) -> dict[str, Any]:
    """Return Gemma's norms, factors and soft caps. As in llama.cpp, the 27B models scale scores by
    the model's width over its heads, and others by the head dim."""
    layers = whole(fields, f"{architecture}.block_count")
    by_width = layers == _SCALED_BY_WIDTH[architecture] and width_per_head != head_dim
    attention, logits = (50.0, 30.0) if architecture == "gemma2" else (0.0, 0.0)
    return {
        "activation": "gelu_tanh",
        "norms_outputs": True,
        "unit_offset_norms": True,
        "embedding_multiplier": whole(fields, f"{architecture}.embedding_length") ** 0.5,
        "attention_multiplier": width_per_head**-0.5 if by_width else None,
        "attention_soft_cap": number(fields, f"{architecture}.attn_logit_softcapping", attention)
        or None,
        "logits_soft_cap": number(fields, f"{architecture}.final_logit_softcapping", logits)
        or None,
    }


def _granite(fields: Fields, head_dim: int) -> dict[str, float]:
    """Return Granite's factors. As in llama.cpp, logits are divided by logit_scale, and a factor
    that is 0 or missing is not applied. Only logit_scale must be there and above 0."""
    return {
        "attention_multiplier": number(fields, "granite.attention.scale", 0) or head_dim**-0.5,
        "embedding_multiplier": number(fields, "granite.embedding_scale", 0) or 1.0,
        "residual_multiplier": number(fields, "granite.residual_scale", 0) or 1.0,
        "logits_scaling": number(fields, "granite.logit_scale"),
    }
