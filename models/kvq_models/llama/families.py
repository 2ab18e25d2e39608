"""The families of models: one table of the properties that a model_type implies and that its
config.json does not state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvq_models.llama.config_fields import required
from kvq_models.llama.experts_config import COUNTS

MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
_GEMMA = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

Activation = Literal["silu", "gelu_tanh"]


class Family(NamedTuple):
    """Properties that a model_type implies and config.json does not state."""

    architecture: str
    qkv_bias: bool | None = None  # None: config.json's attention_bias decides
    o_bias: bool | None = None
    mlp_bias: bool | None = None  # None: config.json's mlp_bias decides
    attention_bias: bool = False  # the default if config.json has none
    activation: Activation = "silu"
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norms_inputs: bool = True
    norms_outputs: bool = False
    unit_offset_norms: bool = False
    scales_embedding: bool = False
    attention_sinks: bool = False
    tied: bool = False  # the default if config.json does not say
    head_dim: int | None = None  # the default; None: hidden_size // num_attention_heads
    sliding_window: int | None = None  # the default
    full_layer_step: int | None = None  # the default without layer_types; None: no windows
    rope_theta: float = 1e4  # the default
    rope_scaling: Mapping[str, Any] = {}  # the default
    local_rope_theta: float | None = None  # None: windowed layers have the model's RoPE
    mlp_width: str = "intermediate_size"  # config.json's field of the MLP's width
    fields: tuple[str, ...] = ()  # fields of config.json that other families must not have


_QWEN3 = Family("Qwen3ForCausalLM", mlp_bias=False, qk_norm=True, head_dim=128, sliding_window=4096)
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    mlp_bias=False,
    qk_norm=True,
    joint_qk_norm=True,
    norms_inputs=False,
    norms_outputs=True,
)
_GEMMA2 = Family(
    "Gemma2ForCausalLM",
    mlp_bias=False,
    activation="gelu_tanh",
    norms_outputs=True,
    unit_offset_norms=True,
    scales_embedding=True,
    tied=True,
    head_dim=256,
    sliding_window=4096,
    full_layer_step=2,
    fields=_GEMMA,
)
_MINISTRAL3_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", False, False, False, sliding_window=4096),
    "ministral3": Family(
        "Ministral3ForCausalLM", False, False, False, rope_theta=1e6, rope_scaling=_MINISTRAL3_YARN
    ),
    "qwen2": Family("Qwen2ForCausalLM", True, False, False, sliding_window=4096),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3._replace(architecture="Qwen3MoeForCausalLM", fields=COUNTS),
    "mixtral": Family("MixtralForCausalLM", False, False, False, rope_theta=1e6, fields=COUNTS),
    "granite": Family("GraniteForCausalLM", fields=MULTIPLIERS),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        mlp_bias=False,
        mlp_width="shared_intermediate_size",
        fields=MULTIPLIERS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        tied=True,
        rope_theta=2e6,
        fields=("no_rope_layers", "no_rope_layer_interval"),
    ),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(
        architecture="Olmo3ForCausalLM",
        sliding_window=4096,
        full_layer_step=4,
        rope_theta=5e5,
        local_rope_theta=5e5,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        full_layer_step=6,
        rope_theta=1e6,
        local_rope_theta=1e4,
        fields=(*_GEMMA, "rope_local_base_freq"),
    ),
    "phi3": Family("Phi3ForCausalLM", False, False, False, fields=("partial_rotary_factor",)),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        mlp_bias=False,
        attention_bias=True,
        attention_sinks=True,
        head_dim=64,
        sliding_window=128,
        full_layer_step=2,
        rope_theta=1.5e5,
        rope_scaling=_GPT_OSS_YARN,
        fields=COUNTS,
    ),
}

# Families that people ask for, with the parts that are missing here.
LINEAR = "layers of linear attention, which keep a state in place of keys and values"
LLAMA4 = "attention in chunks with scaled queries, and experts beside an MLP"
GEMMA4 = (
    "norms of values, an embedding for each layer, layers that share keys and values, and heads of"
    " two sizes"
)
REFUSED = {
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "qwen3_next": LINEAR,
    "qwen3_5": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
}


def check_model_type(model_type: str) -> None:
    """Raise NotImplementedError for a family that is not in the table, with the parts that are
    missing for it if they are known."""
    if model_type not in FAMILIES:
        reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise NotImplementedError(
            f"config field model_type={model_type!r} is not supported{reason}; supported:"
            f" {', '.join(FAMILIES)}"
        )


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raise NotImplementedError for another model_type or
    architecture."""
    model_type = required(hf, "model_type", str)
    check_model_type(model_type)
    family = FAMILIES[model_type]
    architectures = hf.get("architectures") or [family.architecture]
    base = family.architecture.replace("ForCausalLM", "Model")  # saved without its head
    if architectures not in ([family.architecture], [base]):
        raise NotImplementedError(
            f"config field {architectures=} is not supported for {model_type=}; supported:"
            f" {family.architecture}"
        )
    return family
