"""The model's configuration: one frozen value with Hugging Face's names, read from and written to
config.json.

`LlamaConfig.from_hf` reads a config.json of the families in families.py, and names the field if
this model would compute it wrongly. `LlamaConfig.to_hf` writes a file that old and new versions of
transformers can read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvq_jax.layer.attention import Attention
from kvq_jax.layer.known_attention import WINDOWS_EVERYWHERE
from kvq_models.llama import families
from kvq_models.llama.config_fields import check_positive, optional, required, token_ids
from kvq_models.llama.end_tokens import end_tokens
from kvq_models.llama.experts_config import ExpertsConfig, experts_from_hf, experts_to_hf
from kvq_models.llama.generation_defaults import GenerationDefaults
from kvq_models.llama.layer_kinds import checked_layers, sliding_window, unrotated_layers
from kvq_models.llama.quantized.kv_scales import KVScales, brings_kv_scales
from kvq_models.llama.rope_config import RopeConfig, check_rotation, rope_from_hf, rope_to_hf
from kvq_models.llama.text_part import text_fields
from kvq_models.llama.unsupported_fields import ACTIVATIONS, refuse_unsupported


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of one model. Static and hashable: safe as metadata of a jitted function's
    arguments.

    Fields have Hugging Face's names. In addition:
        sliding_window: number of tokens that each token of the `windowed_layers` attends to, itself
            included, or None if all layers attend to all.
        qkv_bias, o_bias, mlp_bias: biases of the projections.
        activation: of the MLP's gate: silu, or GELU's tanh approximation (Gemma).
        qk_norm: RMSNorm of each head's queries and keys (Qwen3).
        joint_qk_norm: that norm is taken over all heads together (OLMo 2).
        norms_inputs: RMSNorm of what attention and the MLP read.
        norms_outputs: RMSNorm of what they add to the residual stream (OLMo 2, Gemma).
        unit_offset_norms: norms multiply by 1 + weight (Gemma).
        unrotated_layers: the layers without RoPE (SmolLM3).
        embedding_multiplier, residual_multiplier: factors of the embedding (Granite, Gemma), and of
            what a layer adds to the residual stream (Granite).
        attention_multiplier: the factor of the scores, or None for 1 / sqrt(head_dim) (Granite,
            Gemma).
        logits_scaling: logits are divided by it (Granite).
        attention_soft_cap, logits_soft_cap: c tanh(x / c) of scores x and of logits x (Gemma 2).
        attention_sinks: the softmax of a head has one more logit, which is learned and which no
            value belongs to (gpt-oss).
        local_rope: the RoPE of windowed layers, or None if it is that of all (Gemma 3, OLMo 3).
        experts: a mixture of experts in place of every MLP (Mixtral, Qwen3-MoE).
        eos_token_ids: all tokens at which generation stops.
        generation: the sampling that the checkpoint asks for, if the caller does not say.
        brings_kv_scales: the checkpoint has scales for an fp8 cache, `kv_scales`, which are known
            once its files are read.
        dtype: of the model that carries this config; not part of the checkpoint.

    Raises NotImplementedError for another model_type, and ValueError for values that are not
    positive or not finite, and for head counts that do not divide.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    model_type: str = "llama"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: families.Activation = "silu"
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norms_inputs: bool = True
    norms_outputs: bool = False
    unit_offset_norms: bool = False
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    attention_sinks: bool = False
    experts: ExpertsConfig | None = None
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    generation: GenerationDefaults = dataclasses.field(default=GenerationDefaults(), compare=False)
    brings_kv_scales: bool = False
    kv_scales: KVScales | None = dataclasses.field(default=None, compare=False, repr=False)
    dtype: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        families.check_model_type(self.model_type)
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config field {name}={value!r} must be a positive integer")
        checked_layers(self.num_hidden_layers)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config field num_key_value_heads={self.num_key_value_heads} must divide"
                f" num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"config field head_dim={self.head_dim} must be even: RoPE rotates pairs of"
                " channels"
            )
        for rope in filter(None, (self.rope, self.local_rope)):
            check_rotation(rope, self.head_dim)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        for name in (*families.MULTIPLIERS, "attention_soft_cap", "logits_soft_cap"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"config field sliding_window={self.sliding_window} must be positive")

    @functools.cached_property
    def attention(self) -> tuple[Attention, ...]:
        """Return the attention of each layer, or () if all are plain. Queries carry the factor of
        the scores."""
        if not (self.windowed_layers or self.attention_soft_cap or self.attention_sinks):
            return ()
        return tuple(
            Attention(
                window=self.sliding_window if i in self.windowed_layers else None,
                soft_cap=self.attention_soft_cap,
                sinks=self.attention_sinks,
            )
            for i in range(self.num_hidden_layers)
        )

    @property
    def positions(self) -> int:
        """Return the length up to which a sequence is computed as in training."""
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> LlamaConfig:
        """Return the configuration described by the contents of a config.json, or by their part
        about the language model if the checkpoint reads images, too.

        Raises ValueError for a missing or malformed field, and NotImplementedError for a
        model_type, architecture, RoPE type, activation, quantization or kind of layer that this
        model does not compute.
        """
        hf = text_fields(hf)
        family = families.family_of(hf)
        window, windowed = sliding_window(hf, family)
        refuse_unsupported(hf, family)
        rope, local_rope = rope_from_hf(hf, family)
        heads = required(hf, "num_attention_heads", int)
        hidden = required(hf, "hidden_size", int)
        attention_bias = optional(hf, "attention_bias", bool, family.attention_bias)
        vocab_size = required(hf, "vocab_size", int)
        return cls(
            model_type=hf["model_type"],
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=required(hf, family.mlp_width, int),
            num_hidden_layers=required(hf, "num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=_key_value_heads(hf, heads),
            head_dim=_head_dim(hf, family, hidden, heads),
            max_position_embeddings=required(hf, "max_position_embeddings", int),
            sliding_window=window,
            windowed_layers=windowed,
            rms_norm_eps=required(hf, "rms_norm_eps", float),
            tie_word_embeddings=optional(hf, "tie_word_embeddings", bool, family.tied),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=(
                optional(hf, "mlp_bias", bool, False)
                if family.mlp_bias is None
                else family.mlp_bias
            ),
            activation=family.activation,
            qk_norm=family.qk_norm,
            joint_qk_norm=family.joint_qk_norm,
            norms_inputs=family.norms_inputs,
            norms_outputs=family.norms_outputs,
            unit_offset_norms=family.unit_offset_norms,
            unrotated_layers=unrotated_layers(hf),
            attention_sinks=family.attention_sinks,
            experts=experts_from_hf(hf),
            **_factors(hf, family),
            rope=rope,
            local_rope=local_rope,
            bos_token_id=optional(hf, "bos_token_id", int, None),
            eos_token_ids=end_tokens(token_ids(hf, "eos_token_id"), {}, vocab_size),
            pad_token_id=optional(hf, "pad_token_id", int, None),
            brings_kv_scales=brings_kv_scales(hf),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a config.json. from_hf(to_hf()) gives this value back.

        RoPE is written in the older spelling (`rope_theta`, `rope_scaling`), which old and new
        readers understand. Raises ValueError if the family cannot express this config (a Mistral
        with biases, a Llama with QK-norm).
        """
        ends = self.eos_token_ids
        hf = {
            "architectures": [families.FAMILIES[self.model_type].architecture],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in _SIZES},
            _ACTIVATION[self.activation]: ACTIVATIONS[self.activation][0],
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "rope_theta": self.rope.theta,
            "rope_scaling": rope_to_hf(self.rope, families.FAMILIES[self.model_type]),
            **self._window_to_hf(),
            **self._family_to_hf(),
            **experts_to_hf(self.experts, self.model_type),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(ends) if len(ends) > 1 else ends[0] if ends else None,
            "pad_token_id": self.pad_token_id,
        }
        read_back = LlamaConfig.from_hf(hf)
        names = [field.name for field in dataclasses.fields(self) if field.compare]
        lost = [
            f"{name}={getattr(self, name)}"
            for name in names
            if getattr(read_back, name) != getattr(self, name)
        ]
        if lost:
            raise ValueError(
                f"a config.json of model_type={self.model_type!r} cannot express {', '.join(lost)}"
            )
        return hf

    def _family_to_hf(self) -> dict[str, Any]:
        family = families.FAMILIES[self.model_type].fields
        values: dict[str, Any] = {
            name: getattr(self, name) for name in families.MULTIPLIERS if name in family
        }
        if "no_rope_layers" in family:
            layers = range(self.num_hidden_layers)
            values["no_rope_layers"] = [int(i not in self.unrotated_layers) for i in layers]
        values = {name: value for name, value in values.items() if value is not None}
        if "query_pre_attn_scalar" in family:
            scale = self.attention_multiplier
            values |= {
                "query_pre_attn_scalar": self.head_dim if scale is None else round(scale**-2),
                "attn_logit_softcapping": self.attention_soft_cap,
                "final_logit_softcapping": self.logits_soft_cap,
            }
        if "rope_local_base_freq" in family and self.local_rope is not None:
            values["rope_local_base_freq"] = self.local_rope.theta
        if "partial_rotary_factor" in family:
            values["partial_rotary_factor"] = self.rope.partial_rotary_factor
            values["original_max_position_embeddings"] = self.rope.original_max_position_embeddings
        if self.model_type == "granitemoehybrid":
            values |= {
                "shared_intermediate_size": self.intermediate_size,
                "num_local_experts": 0,
                "layer_types": ["attention"] * self.num_hidden_layers,
                "position_embedding_type": None if self.unrotated_layers else "rope",
            }
        return values

    def _window_to_hf(self) -> dict[str, Any]:
        stated = families.FAMILIES[self.model_type].full_layer_step is not None
        if self.model_type in WINDOWS_EVERYWHERE or (self.sliding_window is None and not stated):
            window = self.sliding_window
            return {"sliding_window": window, "use_sliding_window": window is not None}
        kinds = [
            "sliding_attention" if i in self.windowed_layers else "full_attention"
            for i in range(self.num_hidden_layers)
        ]
        return {
            "sliding_window": self.sliding_window,
            "use_sliding_window": True,
            "layer_types": kinds,
        }


# config.json's field of an activation, by its name here
_ACTIVATION = {"silu": "hidden_act", "gelu_tanh": "hidden_activation"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _factors(hf: Mapping[str, Any], family: families.Family) -> dict[str, Any]:
    """Return the family's factors of embedding, scores, logits and residual stream, and its soft
    caps."""
    factors: dict[str, Any] = {
        name: optional(hf, name, float, 1.0)  # the default of GraniteConfig
        for name in families.MULTIPLIERS
        if name in family.fields
    }
    if family.scales_embedding:
        factors["embedding_multiplier"] = required(hf, "hidden_size", int) ** 0.5
    if "query_pre_attn_scalar" in family.fields:
        scalar = optional(hf, "query_pre_attn_scalar", float, 256.0)
        check_positive("query_pre_attn_scalar", scalar)
        width, heads = (required(hf, n, int) for n in ("hidden_size", "num_attention_heads"))
        plain = scalar == _head_dim(hf, family, width, heads)
        caps = (50.0, 30.0) if hf["model_type"] == "gemma2" else (None, None)
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        attention, logits = (
            optional(hf, name, float, None) if name in hf else cap
            for name, cap in zip(names, caps, strict=True)
        )
        factors |= {
            "attention_multiplier": None if plain else scalar**-0.5,
            "attention_soft_cap": attention,
            "logits_soft_cap": logits,
        }
    return factors


def _key_value_heads(hf: Mapping[str, Any], heads: int) -> int:
    """Return the number of KV heads. Llama configs from before grouped-query attention lack the
    field. Other families always have it."""
    if hf["model_type"] == "llama":
        return optional(hf, "num_key_value_heads", int, heads)
    return required(hf, "num_key_value_heads", int)


def _head_dim(hf: Mapping[str, Any], family: families.Family, hidden: int, heads: int) -> int:
    explicit = optional(hf, "head_dim", int, family.head_dim)
    if explicit is not None:
        return explicit
    if heads < 1 or hidden % heads:
        raise ValueError(
            f"config field num_attention_heads={heads} must divide hidden_size={hidden} if"
            " head_dim is not given"
        )
    return hidden // heads
