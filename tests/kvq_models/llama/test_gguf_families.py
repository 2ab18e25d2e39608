"""GGUF files of all families load like the models they were made from: names of
tensors, order of rows, factors, norms, layers without RoPE, experts in one tensor or in many."""

import dataclasses
import pathlib
import struct
from typing import Any

import jax
import numpy as np
import pytest

from kvq_models.llama import fused_tensors, gguf_names, hf_names
from kvq_models.llama import open_checkpoint as opening
from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama, forward
from tests.kvq_models.checkpoints import (
    CASES,
    LONGROPE,
    YARN,
    random_llama,
    random_tokens,
    row_errors,
    tiny_config,
    torch_logits,
)
from tests.kvq_models.gguf_files import SWAPPED, gguf_name, write_gguf
from tests.kvq_models.llama.test_gguf import refusal

GRANITE = CASES["granite"].fields | {"tie_word_embeddings": False}
MIXTRAL, QWEN3_MOE = CASES["mixtral"].fields, CASES["qwen3_moe"].fields
QWEN3_MOE = QWEN3_MOE | {"moe_intermediate_size": 32, "norm_topk_prob": True}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA |= {"tie_word_embeddings": True}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8}
ONE = {"num_hidden_layers": 1}
MODELS = {
    "llama": ("llama", tiny_config(**ONE, head_dim=8)),
    "llama_tied_mha": (
        "llama",
        tiny_config(**ONE, num_key_value_heads=4, tie_word_embeddings=True),
    ),
    "llama_biases": ("llama", tiny_config(**ONE, attention_bias=True, mlp_bias=True)),
    "qwen2": ("qwen2", tiny_config("qwen2", **ONE)),
    "qwen3": ("qwen3", tiny_config("qwen3", **ONE | {"head_dim": 32})),
    "mistral3": ("mistral3", tiny_config("mistral", **ONE)),
    "ministral3": (
        "mistral3",
        tiny_config(
            "ministral3",
            **ONE,
            rope_scaling=YARN
            | {
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.5,
            },
        ),
    ),
    "qwen2vl": ("qwen2vl", tiny_config("qwen2", **ONE)),
    "qwen3vl": ("qwen3vl", tiny_config("qwen3", **ONE | {"head_dim": 32})),
    "granite": (
        "granite",
        tiny_config("granite", attention_bias=True, mlp_bias=True, **ONE | GRANITE),
    ),
    "smollm3": ("smollm3", tiny_config("smollm3", num_hidden_layers=4)),
    "olmo2": ("olmo2", tiny_config("olmo2", **ONE)),
    "qwen3moe": ("qwen3moe", tiny_config("qwen3_moe", **ONE | QWEN3_MOE)),
    "mixtral": ("llama", tiny_config("mixtral", **ONE | MIXTRAL)),
    "gemma2": (
        "gemma2",
        tiny_config("gemma2", **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    ),
    "gemma3": ("gemma3", tiny_config("gemma3_text", **GEMMA, num_hidden_layers=6)),
    "olmo3": (
        "olmo2",
        tiny_config(
            "olmo3", sliding_window=8, num_hidden_layers=4, rope_theta=5e5, rope_scaling=YARN
        ),
    ),
    "phi3": (
        "phi3",
        tiny_config(
            "phi3",
            **ONE,
            partial_rotary_factor=0.75,
            rope_scaling=LONGROPE | {"attention_factor": 1.25},
        ),
    ),
    "gpt-oss": (
        "gpt-oss",
        tiny_config(
            "gpt_oss", **GPT_OSS, rope_theta=1.5e5, rope_scaling=YARN | {"truncate": False}
        ),
    ),
}
MODELS_OF_HALVES = {
    config.model_type: architecture not in SWAPPED for architecture, config in MODELS.values()
}
TOKENS = random_tokens((2, 12))
_logits = jax.jit(forward)


def written(name: str, tmp_path: pathlib.Path, **options: Any) -> tuple[Llama, pathlib.Path]:
    architecture, config = MODELS[name]
    source = random_llama(config)
    return source, write_gguf(
        source, tmp_path / f"{name}.gguf", architecture=architecture, **options
    )


def compared(config: LlamaConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.compare}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_source_does(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    source, path = written(name, tmp_path)
    llama, _ = load_llama(path, dtype="float32")
    assert compared(llama.config) == compared(MODELS[name][1])
    wanted = _logits(source, TOKENS)
    assert row_errors(_logits(llama, TOKENS), wanted).max() < 1e-5
    monkeypatch.setattr(
        gguf_names,
        "swapped_heads",
        lambda config, name: 4 * (".q_proj." in name and MODELS_OF_HALVES[config.model_type]),
    )
    monkeypatch.setattr(fused_tensors.HeadOrder, "of", lambda _, rows: rows)  # Phi-3's slices
    opening._gguf_file.cache_clear()
    wrong = _logits(load_llama(path, dtype="float32")[0], TOKENS)
    assert row_errors(wrong, wanted).max() > 1e-3, "the other order of rows must be seen"


def test_an_attention_factor_multiplies_what_a_log_multiplier_leaves(tmp_path: pathlib.Path):
    """llama.cpp divides YaRN's own factor by that of yarn_log_multiplier first."""
    _, path = written("ministral3", tmp_path, fields={"rope.scaling.attn_factor": 0.5})
    factor, log = read_config(path).rope.attention_factor, np.log(YARN["factor"])
    np.testing.assert_allclose(factor, 0.5 * (1 + 0.1 * log) / (1 + 0.1 * 0.5 * log), rtol=1e-6)


@pytest.mark.parametrize(
    "field", ["rope.scaling.yarn_log_multiplier", "attention.temperature_scale"]
)
def test_a_negative_multiplier_is_refused_by_the_name_of_its_field(field: str, tmp_path):
    _, path = written("ministral3", tmp_path, fields={field: -10.0, "rope.scaling.factor": np.e})
    assert f"mistral3.{field}=-10" in refusal(path)


def test_queries_that_grow_without_yarn_are_refused(tmp_path: pathlib.Path):
    _, path = written("mistral3", tmp_path, fields={"attention.temperature_scale": 0.5})
    assert "temperature_scale=0.5 is not supported with" in refusal(path)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("granite", "attention.scale", None),
        ("granite", "embedding_scale", 0.0),
        ("granite", "residual_scale", None),
        ("granite", "logit_scale", 1 / 2.5),
        ("qwen3moe", "expert_used_count", 2),
        ("mixtral", "expert_used_count", 3),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma3", "attention.sliding_window", 4),
        *((name, "rope.freq_base_swa", 7.0) for name in ("gemma2", "gemma3", "olmo3", "gpt-oss")),
        ("olmo3", "rope.scaling.factor", 1.0),
        ("ministral3", "rope.scaling.yarn_log_multiplier", 1.0),
        ("ministral3", "attention.temperature_scale", 0.25),
        ("phi3", "rope.scaling.attn_factor", 1.0),
        ("gpt-oss", "expert_used_count", 1),
    ],
)
def test_a_changed_field_is_another_model(
    name: str, field: str, value: float | None, tmp_path: pathlib.Path
):
    source, path = written(name, tmp_path, fields={field: value})
    other = load_llama(path, dtype="float32")[0]
    assert row_errors(_logits(other, TOKENS), _logits(source, TOKENS)).max() > 1e-3


def test_granites_factors_of_zero_are_none(tmp_path: pathlib.Path):
    zeros = {"attention.scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0}
    config = read_config(written("granite", tmp_path, fields=zeros)[1])
    assert config.attention_multiplier == config.head_dim**-0.5
    assert (config.embedding_multiplier, config.residual_multiplier) == (1.0, 1.0)
    without = written("granite", tmp_path, fields={"logit_scale": None})[1]
    assert "GGUF field granite.logit_scale is missing" in refusal(without)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=False"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": 2},
            "gemma3.attention.sliding_window_pattern=2",
        ),
        ("granite", {"embedding_length": "wide"}, "embedding_length='wide' is of the wrong type"),
        (
            "granite",
            {"attention.key_length": 0},
            "granite.attention.key_length=0 must be at least 1",
        ),
        ("phi3", {"attention.key_length": 0}, "phi3.attention.key_length=0 must be at least 1"),
        ("llama", {"attention.head_count": 0}, "llama.attention.head_count=0 must be at least 1"),
        ("llama", {"embedding_length": 0}, "llama.embedding_length=0 must be at least 1"),
        ("phi3", {"rope.dimension_count": 0}, "phi3.rope.dimension_count=0 must be at least 1"),
        ("phi3", {"rope.dimension_count": 17}, "rope.dimension_count=17 must be at most the head"),
        ("phi3", {"rope.dimension_count": 8}, "short_factor has 6 entries for 4 pairs"),
        ("qwen3moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm=False"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale=2.5"),
        ("qwen3moe", {"expert_count": 0}, "GGUF field qwen3moe.expert_count=0 must be at least 1"),
        ("qwen3moe", {"expert_count": 5}, "experts.5."),
        ("qwen3moe", {"expert_count": 2**30}, "qwen3moe.expert_count=1073741824 must be at most"),
        ("mixtral", {"expert_count": 0}, "block_sparse_moe"),
        ("mixtral", {"expert_gating_func": 2}, "llama.expert_gating_func=2"),
        ("mixtral", {"expert_shared_count": 1}, "llama.expert_shared_count=1"),
        ("smollm3", {"block_count": 2**31}, "smollm3.block_count=2147483648 must be at most 1024"),
        (
            "mixtral",
            {"block_count": 2**31, "attention.sliding_window": 8},
            "llama.block_count=2147483648 must be at most 1024",
        ),
        (
            "llama",
            {"attention.head_count_kv": 3},
            "GGUF field llama.attention.head_count_kv=3 must divide llama.attention.head_count=4",
        ),
        ("mixtral", {"expert_used_count": 6}, "llama.expert_used_count=6 must be at most the 5"),
        ("granite", {"logit_scale": 0.0}, "GGUF field granite.logit_scale=0.0 must be above 0"),
        ("llama", {"rope.freq_base": 0.5}, "GGUF field llama.rope.freq_base=0.5 must be above 1"),
        ("smollm3", {"logit_scale": 8.0}, "smollm3.logit_scale=8.0"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_field(
    name: str, fields: dict, message: str, tmp_path: pathlib.Path
):
    assert message in refusal(written(name, tmp_path, fields=fields)[1])


def test_longrope_may_be_named_beside_its_factors(tmp_path: pathlib.Path):
    named = {"rope.scaling.type": "longrope"}
    assert read_config(written("phi3", tmp_path, fields=named)[1]) == MODELS["phi3"][1]
    opening._gguf_file.cache_clear()
    without = written("llama", tmp_path, fields=named)[1]
    assert "scaling.type='longrope' is not supported" in refusal(without)


@pytest.mark.parametrize("length", ["short", "long"])
def test_factors_of_one_length_alone_are_refused(length: str, tmp_path: pathlib.Path):
    path = written("phi3", tmp_path)[1]
    name = f"rope_factors_{length}.weight"
    path.write_bytes(path.read_bytes().replace(name.encode(), b"x" * len(name)))
    assert f"the file lacks tensor '{name}'" in refusal(path)


def test_fields_at_neutral_values_change_nothing(tmp_path: pathlib.Path):
    plain = read_config(written("qwen3moe", tmp_path)[1])
    fields = {"expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1}
    assert read_config(written("qwen3moe", tmp_path, fields=fields)[1]) == plain
    default = read_config(
        written("qwen3moe", tmp_path, fields={"expert_feed_forward_length": None})[1]
    )
    assert default.experts is not None
    assert default.experts.intermediate_size == plain.intermediate_size // 3 == 32


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_experts_of_their_own_tensors_are_those_of_one_tensor(
    name: str, kind: str, tmp_path: pathlib.Path
):
    stacked, config = open_checkpoint(written(name, tmp_path, kind=kind)[1]), MODELS[name][1]
    (tmp_path / "each").mkdir()
    each = open_checkpoint(written(name, tmp_path / "each", kind=kind, stacked_experts=False)[1])
    assert stacked.tensors.keys() == each.tensors.keys()
    experts = [name for name in stacked.tensors if ".experts." in name]
    assert config.experts is not None
    assert len(experts) == 3 * config.experts.count
    for one in stacked.tensors:
        assert np.array_equal(stacked.read(one), each.read(one)), one
    assert not np.array_equal(stacked.read(experts[0]), stacked.read(experts[1]))


def test_a_stacked_tensor_that_is_cut_off_or_no_stack_ends_in_one_line(tmp_path: pathlib.Path):
    _, path = written("mixtral", tmp_path)
    data, name = path.read_bytes(), b"blk.0.ffn_down_exps.weight"
    at = data.index(name) + len(name) + 4
    for sizes, message in (
        ((1, 1, 2048), "of at most 1024 experts"),
        ((96, 64, 2**40), "is cut off: tensor 'blk.0.ffn_down_exps.weight' ends at"),
        ((96, 64, 6), "experts.5.w2.weight"),
    ):
        path.write_bytes(data[:at] + struct.pack("<3Q", *sizes) + data[at + 24 :])
        assert message in refusal(path)
    path.write_bytes(data[:-64])
    assert str(path) in refusal(path)


def test_norms_of_another_family_have_no_place(tmp_path: pathlib.Path):
    """One module name stands for two norms: OLMo 2's of an output is no Llama's of an input."""
    name = "model.layers.0.post_attention_layernorm.weight"
    olmo2, llama = (gguf_name(name, architecture).encode() for architecture in ("olmo2", "llama"))
    _, path = written("olmo2", tmp_path)
    renamed = path.read_bytes().replace(
        len(olmo2).to_bytes(8, "little") + olmo2, len(llama).to_bytes(8, "little") + llama
    )
    path.write_bytes(renamed + bytes(64))  # the data of shorter names may begin earlier
    assert "'blk.0.ffn_norm.weight', for which" in refusal(path)


def test_logits_are_those_that_transformers_reads_from_the_file(tmp_path: pathlib.Path):
    """transformers reads Qwen3-MoE's files, and takes the experts' width from its default."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = tiny_config("qwen3_moe", **ONE | QWEN3_MOE | {"moe_intermediate_size": 768})
    path = write_gguf(random_llama(config), tmp_path / "m.gguf", architecture="qwen3moe")
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path, gguf_file=path.name), dtype=torch.float32
    ).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)
    theirs.load_state_dict(read["tensors"])
    wanted = torch_logits(theirs, np.asarray(TOKENS))
    llama = load_llama(path, dtype="float32")[0]
    assert row_errors(_logits(llama, TOKENS), wanted).max() < 1e-4
    assert llama.config.experts is not None
    fewer = dataclasses.replace(
        llama.config, experts=dataclasses.replace(llama.config.experts, per_token=2)
    )
    control = hf_names.replace_weights(
        abstract_llama(fewer), {p: w.leaf for p, w in hf_names.weights(llama).items()}
    )
    assert row_errors(_logits(control, TOKENS), wanted).max() > 1e-2
