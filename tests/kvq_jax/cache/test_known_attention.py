"""A config whose attention a cache would not compute is refused by the name of its field."""

from __future__ import annotations

import pytest
import transformers

import kvq_jax as kvq
from kvq_models import LlamaConfig
from tests.kvq_models.checkpoints import tiny_config

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
}
REFUSED = {
    "Gemma2Config": ({}, "attn_logit_softcapping=50.0"),
    "Gemma3TextConfig": ({}, "query_pre_attn_scalar=256 scales the scores by 0.0625"),
    "GptOssConfig": ({}, "model_type='gpt_oss' has attention sinks"),
    "MistralConfig": ({"sliding_window": 64}, "sliding_window=64 is shorter than the cache's 128"),
    "Qwen2Config": (
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        "sliding_window=64",
    ),
    "Phi3Config": ({"sliding_window": 64}, "sliding_window=64"),
    "GraniteConfig": ({"attention_multiplier": 0.5}, "attention_multiplier=0.5"),
    "DeepseekV3Config": ({}, "kv_lora_rank=512"),
    "Llama4TextConfig": ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    "LlamaConfig": ({"alibi": True}, "alibi=True"),
}
TAKEN = {
    "LlamaConfig": {},
    "Qwen3Config": {},
    "Qwen2Config": {"sliding_window": 64, "use_sliding_window": False},
    "MistralConfig": {"sliding_window": 128},
    "Gemma3TextConfig": {"query_pre_attn_scalar": 32, "sliding_window": 128},
    "GraniteConfig": {"attention_multiplier": 32**-0.5},
}


def config_of(name, fields):
    return getattr(transformers, name)(**SIZES, **fields)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_name(name):
    fields, reason = REFUSED[name]
    with pytest.raises(NotImplementedError) as caught:
        kvq.init_cache("kivi:bits=4", config_of(name, fields), 1, 128)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TAKEN)
def test_plain_attention_is_taken(name):
    assert kvq.init_cache("kivi:bits=4", config_of(name, TAKEN[name]), 1, 128).capacity == 128


def test_dimensions_alone_promise_that_the_model_sees_to_it():
    assert kvq.init_cache("kivi:bits=4", kvq.CacheDims(2, 4, 2, 32, 128), 1, 128).capacity == 128


def test_a_model_of_kvq_refuses_long_sequences_itself():
    windowed = tiny_config(sliding_window=32, windowed_layers=(0,))
    assert isinstance(windowed, LlamaConfig)
    assert kvq.init_cache("kivi:bits=4", windowed, 1, 64, "float32").capacity == 64
