"""config.json in and out: both spellings, the families' implied fields, any value of a field."""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.families import MULTIPLIERS
from kvq_models.llama.rope_config import RopeConfig
from tests.kvq_models.checkpoints import CASES, LLAMA3, SIZES, YARN, YARN_ALL, tiny_config

LLAMA = SIZES | {"model_type": "llama"}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": None}
QWEN2 = SIZES | {"model_type": "qwen2"}
QWEN3 = SIZES | {"model_type": "qwen3", "head_dim": 16}
QWEN3_MOE = SIZES | CASES["qwen3_moe"].fields | {"model_type": "qwen3_moe"}
SMOLLM3 = SIZES | {"model_type": "smollm3"}
GPT_OSS = SIZES | CASES["gpt_oss"].fields | {"model_type": "gpt_oss"}

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_all": YARN_ALL,
    "yarn_attention_factor": YARN | {"attention_factor": 1.5},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_both_spellings_of_rope_give_one_config(rope):
    new = LlamaConfig.from_hf(LLAMA | {"rope_parameters": rope | {"rope_theta": 5e5}})
    assert new.rope.rope_type == rope["rope_type"]
    assert new.rope.theta == 5e5
    old_fields = {name: value for name, value in rope.items() if name != "rope_type"}
    for key in ("type", "rope_type"):
        kind = rope["rope_type"]
        scaling = None if kind == "default" else {key: kind} | old_fields
        old = LlamaConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
        assert old == new, f"spelled with {key!r}"


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(
    "fields", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=lambda fields: fields["model_type"]
)
def test_a_written_config_reads_back_equal(fields, rope):
    extras = {"eos_token_id": [2, 7], "pad_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig.from_hf(fields | extras | {"rope_parameters": rope})
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_yarns_own_attn_factor_multiplies_its_factor():
    """DeepSeek-R1-0528-Qwen3-8B, whose rows keep their length."""
    stated = YARN | {"attn_factor": 0.8782488562869419}
    config = LlamaConfig.from_hf(QWEN3 | {"rope_scaling": stated})
    assert config.rope.attention_factor == pytest.approx(1.0, abs=1e-12)
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    both = LlamaConfig.from_hf(QWEN3 | {"rope_scaling": stated | {"attention_factor": 1.5}})
    assert both.rope.attention_factor == 1.5
    with pytest.raises(ValueError, match="attention_factor=0"):
        LlamaConfig.from_hf(QWEN3 | {"rope_scaling": YARN | {"attn_factor": 0}})


def test_what_a_family_cannot_express_is_not_written():
    for change in ({"qk_norm": True}, {"o_bias": True}):
        config = dataclasses.replace(tiny_config(), **change)
        with pytest.raises(ValueError, match=f"cannot express .*{next(iter(change))}=True"):
            config.to_hf()


@pytest.mark.parametrize(
    ("fields", "biases"),
    [
        (LLAMA, (False, False, False, False)),
        (LLAMA | {"attention_bias": True}, (True, True, False, False)),
        (QWEN2, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        (QWEN3 | {"attention_bias": True}, (True, True, False, True)),
        (GPT_OSS, (True, True, False, False)),
        (GPT_OSS | {"attention_bias": False}, (False, False, False, False)),
    ],
)
def test_biases_and_qk_norm_follow_the_family(fields, biases):
    config = LlamaConfig.from_hf(fields)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == biases


def test_absent_fields_take_the_familys_defaults():
    old_llama = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert LlamaConfig.from_hf(old_llama).num_key_value_heads == SIZES["num_attention_heads"]
    assert LlamaConfig.from_hf(LLAMA | {"head_dim": None}).head_dim == 16
    assert LlamaConfig.from_hf(SIZES | {"model_type": "qwen3"}).head_dim == 128
    assert LlamaConfig.from_hf(LLAMA).rope == RopeConfig()
    yarn = LlamaConfig.from_hf(
        LLAMA | {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}
    ).rope
    assert yarn.factor == SIZES["max_position_embeddings"] / 16


@pytest.mark.parametrize(
    "fields",
    [
        MISTRAL | {"sliding_window": 64},
        QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        QWEN3 | {"layer_types": ["full_attention", "full_attention"], "sliding_window": None},
        QWEN3_MOE | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        LLAMA | {"sliding_window": 16},
        LLAMA | {"quantization_config": None, "partial_rotary_factor": 1.0, "pretraining_tp": 2},
    ],
)
def test_inactive_options_pass(fields):
    assert LlamaConfig.from_hf(fields).sliding_window is None


@pytest.mark.parametrize(
    ("fields", "window", "layers"),
    [
        (MISTRAL | {"sliding_window": 16}, 16, (0, 1)),
        (SIZES | {"model_type": "mistral", "max_position_embeddings": 32768}, 4096, (0, 1)),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            16,
            (1,),
        ),
        (
            QWEN3 | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
            16,
            (1,),
        ),
        (
            QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            16,
            (0, 1),
        ),
        (QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 16}, 16, (0, 1)),
        (
            SMOLLM3 | {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [1, 0]},
            16,
            (1,),
        ),
    ],
)
def test_windows_are_the_attention_of_their_layers(fields, window, layers):
    config = LlamaConfig.from_hf(fields)
    assert (config.sliding_window, config.windowed_layers) == (window, layers)
    assert config.positions == fields["max_position_embeddings"]
    windows = [window if i in layers else None for i in range(2)]
    assert [attention.window for attention in config.attention] == windows
    assert LlamaConfig.from_hf(config.to_hf()) == config, (
        "what is saved has the same window in the same layers"
    )


VALUES = (None, -1, 0, 1.5, 2**31, 10**400, math.nan, math.inf, "x", "", True, [], ["x"], {})


def objects(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an object of JSON and those inside it."""
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from objects(value)


@pytest.mark.parametrize("case", [*CASES, "with_images"])
@pytest.mark.usefixtures("types_unchecked")
def test_a_field_of_any_value_is_read_or_refused_in_one_line(case: str):
    """Every field of every family, also inside of its RoPE's and of a language model's that is a
    part."""
    made = CASES["gemma3" if case == "with_images" else case]
    hf = SIZES | {"model_type": made.model_type, "rope_parameters": made.rope} | made.fields
    if case == "with_images":
        hf = {"model_type": "gemma3", "architectures": None, "text_config": hf}
    LlamaConfig.from_hf(hf)
    refused: list[str] = []
    for number, holder in enumerate(objects(copy.deepcopy(hf))):
        for field, value in itertools.product(list(holder), VALUES):
            changed = copy.deepcopy(hf)
            list(objects(changed))[number][field] = value
            try:
                LlamaConfig.from_hf(changed)
            except (ValueError, NotImplementedError) as error:
                refused.append(str(error))
    assert not [message for message in refused if "\n" in message]
    assert len(refused) > 100, "the control: most values are none of their fields'"


def test_factors_of_granite_that_config_json_leaves_out_are_one():
    """Among them that of the scores, which is 1 / sqrt(head_dim) in every other family."""
    fields = LLAMA | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    config = LlamaConfig.from_hf(fields)
    assert {getattr(config, name) for name in MULTIPLIERS} == {1.0}
    assert LlamaConfig.from_hf(LLAMA).attention_multiplier is None
