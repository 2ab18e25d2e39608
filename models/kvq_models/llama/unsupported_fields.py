"""Fields of config.json that change what a model computes and that this model does not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_models.llama.families import Family
from kvq_models.llama.quantized.quantization_config import quantization_of

# config.json's names of an activation, the first as this project writes it
ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",)}

# Fields of relatives of Llama that turn up under its model_type, with the values that change
# nothing. transformers ignores them, and then computes another model than the one that was trained.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logits_soft_cap": (0,),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "lm_head_multiplier": (1,),
    "key_multiplier": (1,),
    "attention_in_multiplier": (1,),
    "attention_out_multiplier": (1,),
    "mlp_multipliers": ([1, 1],),
    "residual_scale": (1,),
    "embed_scale": (1,),
    "attention_scale": (),
    "softmax_scale": (),
    "logits_bias": (False,),
    "norm_type": ("rmsnorm", "rms_norm"),
    "dual_chunk_attention_config": (),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "rope_interleave": (False,),
    "rope_local_base_freq": (),
    "alibi": (False,),
    "use_parallel_residual": (False,),
    "use_bidirectional_attention": (False,),
    "attn_temperature_tuning": (False, 0),
    "attn_output_gate": (False,),
}


def refuse_unsupported(hf: Mapping[str, Any], family: Family) -> None:
    """Raise NotImplementedError, by name, for a field that this model would compute wrongly. Fields
    that only this family has are computed."""
    activation, known = ACTIVATIONS[family.activation], family.fields
    for name in ("hidden_act", "hidden_activation"):
        if (value := hf.get(name)) is not None and value not in activation:
            raise NotImplementedError(
                f"config field {name}={str(value)[:40]!r} is not supported; supported:"
                f" {activation[0]}"
            )
    quantization_of(hf)
    partial_rotary_factor = hf.get("partial_rotary_factor") or 1.0
    if partial_rotary_factor != 1.0 and "partial_rotary_factor" not in known:
        raise NotImplementedError(
            f"config field {partial_rotary_factor=} is not supported; supported: 1.0 (every channel"
            " rotates)"
        )
    for name, neutral in _NEUTRAL.items():
        value = hf.get(name)
        if value is not None and value not in neutral and name not in known:
            allowed = f"{neutral[0]} or none" if neutral else "none"
            raise NotImplementedError(
                f"config field {name}={str(value)[:40]} is not supported; supported: {allowed}"
            )
