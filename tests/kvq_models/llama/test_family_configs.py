"""config.json of families with windows, two RoPEs, soft caps, sinks and partial rotation, as it is
published: fields that are left out and older spellings."""

import math

import pytest
from transformers import AutoConfig

from kvq_jax.layer.attention import Attention
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.families import FAMILIES
from tests.kvq_models.checkpoints import CASES, SIZES

GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "_sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_gemma_3_has_five_windowed_layers_for_each_global_one():
    config = LlamaConfig.from_hf(GEMMA3_270M)
    assert [i for i in range(18) if config.attention[i] == Attention()] == [5, 11, 17]
    assert config.attention[0] == Attention(window=512)
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.embedding_multiplier == math.sqrt(640)
    assert config.attention_multiplier is None, "256 is the head dim"
    assert config.tie_word_embeddings
    scaled = LlamaConfig.from_hf(
        GEMMA3_270M | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    assert (scaled.rope.factor, scaled.local_rope) == (8.0, config.local_rope)


def test_gemma_2_states_its_caps_or_has_their_defaults():
    fields = {
        key: value
        for key, value in GEMMA3_270M.items()
        if key not in ("architectures", "sliding_window", "rope_local_base_freq")
        and "softcapping" not in key
    } | {"model_type": "gemma2", "query_pre_attn_scalar": 144}
    config = LlamaConfig.from_hf(fields)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert config.attention_multiplier == 144**-0.5
    assert config.attention[:2] == (Attention(4096, None, 50.0), Attention(None, None, 50.0))
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    uncapped = LlamaConfig.from_hf(fields | none)
    assert (uncapped.attention_soft_cap, uncapped.logits_soft_cap) == (None, None)


def test_phi_4_mini_rotates_three_quarters_of_a_head():
    config = LlamaConfig.from_hf(PHI4_MINI)
    assert (config.rope.rope_type, config.rope.partial_rotary_factor) == ("longrope", 0.75)
    assert config.rope.factor == 32
    assert config.attention == (), "its window spans the context"
    assert LlamaConfig.from_hf(PHI4_MINI | {"sliding_window": 2047}).windowed_layers == tuple(
        range(32)
    )


def test_gpt_oss_has_sinks_in_all_layers_and_a_window_in_every_other():
    config = LlamaConfig.from_hf(GPT_OSS_20B)
    assert config.attention[:2] == (Attention(window=128, sinks=True), Attention(sinks=True))
    assert config.experts is not None
    assert (config.experts.swiglu_limit, config.experts.swiglu_alpha) == (7.0, 1.702)
    assert not config.rope.truncate
    plain = LlamaConfig.from_hf(GPT_OSS_20B | {"rope_scaling": {"rope_type": "default"}})
    assert plain.rope.rope_type == "default"
    assert LlamaConfig.from_hf(plain.to_hf()) == plain


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_rope_and_a_tie_that_are_not_stated_are_those_of_transformers(model_type: str):
    case = next(case for case in CASES.values() if case.model_type == model_type)
    fields = SIZES | case.fields | {"model_type": model_type, "tie_word_embeddings": None}
    config = LlamaConfig.from_hf(fields)
    del fields["tie_word_embeddings"]
    theirs = AutoConfig.for_model(**fields)
    rope = theirs.rope_parameters
    if config.local_rope is not None:
        assert config.local_rope.theta == rope["sliding_attention"]["rope_theta"]
    full = rope.get("full_attention", rope)
    assert config.rope.theta == full["rope_theta"]
    assert config.rope.rope_type == full["rope_type"]
    assert (config.rope.factor, config.rope.truncate) == (
        full.get("factor", 1.0),
        full.get("truncate", True),
    )
    assert LlamaConfig.from_hf(config.to_hf()) == config
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
