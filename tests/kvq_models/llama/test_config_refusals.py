"""One table of config.json that would be computed wrongly or is malformed: a refusal is one line
that names the field."""

import math
from typing import Any

import pytest

from kvq_models.llama.config import LlamaConfig
from tests.kvq_models.checkpoints import CASES, LLAMA3, SIZES, YARN
from tests.kvq_models.llama.published_cases import AWQ, GPTQ, compressed, packed_group
from tests.kvq_models.llama.test_family_configs import GEMMA3_270M, GPT_OSS_20B, PHI4_MINI

LLAMA = SIZES | {"model_type": "llama"}
MIXTRAL, QWEN3_MOE = (
    {"model_type": name} | CASES[name].fields for name in ("mixtral", "qwen3_moe")
)
QWEN2 = {"model_type": "qwen2"} | CASES["qwen2_window"].fields
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
ABSENT = object()  # the value of a field that is left out


def with_rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_scaling": scaling}


def with_phi(**scaling: Any) -> dict[str, Any]:
    return PHI4_MINI | {"rope_scaling": PHI4_MINI["rope_scaling"] | scaling}


def with_images(**fields: Any) -> dict[str, Any]:
    """A checkpoint that reads images beside its language model."""
    whole = {"model_type": "gemma3", "architectures": None, "text_config": {}}
    return whole | fields


def local_rope(**fields: Any) -> dict[str, Any]:
    """RoPE of windowed layers, beside a plain one of the others."""
    return {"rope_parameters": {"full_attention": {}, "sliding_attention": fields}}


ONE_FACTOR = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
UNSUPPORTED = [
    ({"model_type": "gpt2"}, "model_type='gpt2'"),
    ({"model_type": "llama4_text"}, "'llama4_text' is not supported (attention in chunks"),
    ({"model_type": "qwen3_5_text"}, "'qwen3_5_text' is not supported (layers of linear"),
    (with_images(text_config={"model_type": "mamba"}), "text_config.model_type='mamba'"),
    (with_images(architectures=["Gemma3Rerank"]), "architectures=['Gemma3Rerank']"),
    ({"architectures": ["LlamaForCausalLM2"]}, "architectures=['LlamaForCausalLM2']"),
    (with_rope(type="proportional", factor=2.0), "rope_type='proportional'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    (with_rope(**YARN, llama_4_scaling_beta=0.1), "rope_scaling.llama_4_scaling_beta=0.1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    (PHI4_MINI | {"model_type": "llama", "architectures": None}, "partial_rotary_factor=0.75"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (GEMMA3_270M | {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    (GEMMA3_270M | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "contains chunked_attention"),
    (WINDOWS, "sliding_attention, which model_type='llama' does not read; supported: full"),
    (QWEN3_MOE | WINDOWS, "sliding_attention, which model_type='qwen3_moe' does not read"),
    (QWEN2 | WINDOWS | {"use_sliding_window": False}, "and use_sliding_window=False"),
    ({"num_local_experts": 8}, "num_local_experts=8 is not supported; supported: 0 or none"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] is not supported"),
    ({"lm_head_multiplier": 0.04}, "lm_head_multiplier=0.04 is not supported; supported: 1 or"),
    ({"norm_type": "layernorm"}, "norm_type=layernorm is not supported; supported: rmsnorm"),
    (QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    (with_rope(factor=8.0), "rope_scaling.factor=8.0 is of no rope_type"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "rope_parameters.factor=2.0 is"),
    ({"embedding_multiplier": 12}, "embedding_multiplier=12 is not supported"),
]
MALFORMED = [
    (
        with_rope(**YARN) | {"rope_parameters": {"rope_theta": 1e6}},
        "rope_scaling and rope_parameters differ: state one",
    ),
    ({"rope_scaling": []}, "rope_scaling='[]' must be an object"),
    ({"rope_parameters": 0}, "rope_parameters='0' must be an object"),
    ({"model_type": ABSENT}, "model_type is missing"),
    (
        {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": ABSENT},
        "num_key_value_heads is missing",
    ),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "=3 must divide hidden_size=64"),
    ({"head_dim": 15}, "head_dim=15 must be even"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be of type bool"),
    ({"rope_theta": math.nan}, "rope_theta=nan must be above 1 and finite"),
    ({"rope_theta": 1e300}, "finite in float32"),
    (with_rope(type="llama3", factor=8.0), "low_freq_factor is missing"),
    (with_rope(**LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor=4.0 must be below"),
    (with_rope(**LLAMA3 | {"low_freq_factor": math.nan}), "low_freq_factor=nan must be above 0"),
    (with_rope(**YARN | {"attention_factor": 0.0}), "attention_factor=0.0 must be above 0"),
    (with_rope(type="dynamic", factor=2.0) | {"head_dim": 2}, "=2 is too small for rope_type="),
    (GEMMA3_270M | {"layer_types": ["full_attention"]}, "1 entries for 18 layers"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 2 layers"),
    (QWEN2 | {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 2 layers"),
    (QWEN2 | {"max_window_layers": -2}, "max_window_layers=-2 must be at least 0"),
    (PHI4_MINI | {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    (
        with_phi(type="dynamic", factor=2.0) | {"partial_rotary_factor": 0.02},
        "=128 is too small for",
    ),
    (PHI4_MINI | {"original_max_position_embeddings": 1}, "_embeddings=1 must be at least 2"),
    (
        GEMMA3_270M | local_rope(rope_type="dynamic", factor=2.0) | {"head_dim": 2},
        "=2 is too small",
    ),
    (GEMMA3_270M | local_rope(**ONE_FACTOR), "short_factor has 1 entries for 128 pairs"),
    (with_phi(long_factor=ABSENT), "long_factor is missing"),
    (with_phi(long_factor=[2.0] * 64), "long_factor has 64 entries for 48 pairs"),
    (GPT_OSS_20B | {"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
    (MIXTRAL | {"num_local_experts": 0}, "num_local_experts=0 must be at least 1"),
    (MIXTRAL | {"num_experts_per_tok": 6}, "num_experts_per_tok=6 must be at most the 5 experts"),
    (QWEN3_MOE | {"num_experts": 2048}, "num_experts=2048 must be at most 1024"),
    (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be at least 1"),
]


def with_targets(*targets: str) -> dict[str, Any]:
    groups = packed_group()["config_groups"]
    return packed_group() | {"config_groups": {"g": groups["group_0"] | {"targets": targets}}}


QUANTIZATION = [
    ({"quant_method": "aqlm"}, "quant_method='aqlm', which is not supported; supported: unq"),
    ({"quant_method": "hqq", "bits": 4}, "has quant_method='hqq', bits='4', which is not"),
    ({"quant_method": "gptq"}, "quantization_config"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method='modelopt'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ', which is"),
    (GPTQ | {"bits": 3}, "bits='3', which is not supported; supported: 2 or 4 or 8"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    (GPTQ | {"group_size": 0}, "group_size='0'"),
    (GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}}, "has dynamic="),
    (GPTQ | {"dynamic": [1]}, "has dynamic='[1]'"),
    (GPTQ | {"modules_to_not_convert": 3}, "has modules_to_not_convert='3'"),
    (AWQ | {"version": "gemv"}, "version='gemv', which is not supported; supported: gemm"),
    (AWQ | {"zero_point": False}, "zero_point='False'"),
    (AWQ | {"modules_to_not_convert": [None]}, "has modules_to_not_convert='[None]'"),
    ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, "load_in_4bit='None'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size='[128, 0]'"),
    (compressed("pack"), "quant_method='compressed-tensors', format='pack'"),
    (compressed("nvfp4-pack-quantized", num_bits=4), "format='nvfp4-pack-quantized'"),
    (compressed("dense") | {"config_groups": {"g": {"weights": 3}}}, "has weights='3'"),
    (compressed("dense") | {"config_groups": [3]}, "has config_groups='[3]'"),
    (packed_group(num_bits=3), "num_bits='3'"),
    (packed_group() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    (packed_group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (packed_group() | {"ignore": ["re:("]}, "'re:(' in ignore, which is not a regular expression"),
    (GPTQ | {"dynamic": {"-:*.q": {}}}, "'re:*.q' in dynamic, which is not a regular expression"),
    (with_targets("re:*.proj"), "'re:*.proj' in targets, which is not a regular expr"),
    (packed_group() | {"ignore": ["re:a{9999999999}"]}, "in ignore, which is not a regular"),
    (packed_group() | {"ignore": [f"re:{'(' * 9999}"]}, "in ignore, which is not a regular"),
    (packed_group() | {"ignore": ["re:(?!lm_head).*"]}, "that is read: groups that start with (?"),
    (["gptq"], "no quant_method"),
]
UNSUPPORTED += [({"quantization_config": fields}, message) for fields, message in QUANTIZATION]
UNSUPPORTED += [({"quantization": {"group_size": 64, "bits": 4}}, "has bits='4', which is not")]


def present(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, and those inside them, without the ones that are left out."""
    return {
        name: present(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not ABSENT
    }


@pytest.mark.parametrize(
    ("fields", "message", "error"),
    [
        *((*row, NotImplementedError) for row in UNSUPPORTED),
        *((*row, ValueError) for row in MALFORMED),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field(
    fields: dict[str, Any], message: str, error: type[Exception]
):
    with pytest.raises(error) as refusal:
        LlamaConfig.from_hf(present(LLAMA | fields))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_fields_that_say_nothing_are_read():
    neutral = {"key_multiplier": 1.0, "norm_type": "rmsnorm", "mlp_multipliers": [1.0, 1.0]}
    assert LlamaConfig.from_hf(LLAMA | neutral) == LlamaConfig.from_hf(LLAMA)
    neutral = {"num_local_experts": 0, "embedding_multiplier": 1.0, "use_qk_norm": False}
    assert LlamaConfig.from_hf(LLAMA | neutral) == LlamaConfig.from_hf(LLAMA)
