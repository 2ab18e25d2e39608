"""The families of GGUF files: experts, factors, norms of outputs, and layers without RoPE."""

from __future__ import annotations

from typing import Any

from kvq_models.llama.experts_config import ExpertsConfig
from kvq_models.llama.gguf_fields import Fields, number, whole

# The model_type of each architecture. Files of Mistral and Mixtral say llama.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
}
_UNROTATED_STEP = 4  # of smollm3's layers; llama.cpp reads it from no field


def family_fields(fields: Fields, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of `LlamaConfig` that tell the families apart. Raises ValueError for a
    missing or malformed field."""
    family: dict[str, Any] = {"model_type": MODEL_TYPES[architecture]}
    if architecture in ("qwen3", "qwen3moe", "olmo2"):
        family["qk_norm"] = True
    match architecture:
        case "llama" if experts := _experts(fields, architecture):
            family |= {"model_type": "mixtral", "experts": experts}
        case "qwen3moe":
            family["experts"] = _experts(fields, architecture)
        case "granite":
            family |= _granite(fields, head_dim)
        case "olmo2":
            family |= {"joint_qk_norm": True, "norms_inputs": False, "norms_outputs": True}
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
    size = whole(fields, f"{architecture}.feed_forward_length")
    if architecture == "qwen3moe":
        each = whole(fields, f"{architecture}.expert_feed_forward_length", 0)
        size = each or size // max(per_token, 1)
    return ExpertsConfig(count, per_token, size)


def _granite(fields: Fields, head_dim: int) -> dict[str, float]:
    """Return Granite's factors. As in llama.cpp, logits are divided by logit_scale, and a factor of
    0 or none is no factor."""
    return {
        "attention_multiplier": number(fields, "granite.attention.scale", 0) or head_dim**-0.5,
        "embedding_multiplier": number(fields, "granite.embedding_scale", 0) or 1.0,
        "residual_multiplier": number(fields, "granite.residual_scale", 0) or 1.0,
        "logits_scaling": number(fields, "granite.logit_scale"),
    }
