"""Granite 4's dense models: hybrids by their model_type, without a layer of linear attention."""

import pathlib
from typing import Any

import jax
import pytest

from kvq_models.llama.checkpoint import load_llama, read_config
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import forward
from tests.kvq_models.checkpoints import CASES, SIZES, random_llama, random_tokens, row_errors
from tests.kvq_models.gguf_files import write_gguf
from tests.kvq_models.llama.test_gguf import refusal

logits = jax.jit(forward)
FIELDS = SIZES | CASES["granite_4"].fields | {"model_type": "granitemoehybrid"}
# what llama.cpp's converter writes for a hybrid, whatever its layers
OF_HYBRIDS = {
    "attention.head_count_kv": [2, 2],
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 80,
    "rope.scaling.finetuned": True,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 1,
    "ssm.inner_size": 128,
    "ssm.state_size": 256,
    "ssm.time_step_rank": 128,
}


def test_the_shared_mlp_is_the_only_one():
    config = LlamaConfig.from_hf(FIELDS)
    assert config.intermediate_size == 80
    assert LlamaConfig.from_hf(config.to_hf()) == config
    unrotated = LlamaConfig.from_hf(FIELDS | {"position_embedding_type": "nope"})
    assert (config.unrotated_layers, unrotated.unrotated_layers) == ((), (0, 1))
    assert LlamaConfig.from_hf(unrotated.to_hf()) == unrotated


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["mamba", "attention"]}, "layer_types has layers of linear attention"),
        (
            {"layer_types": ["mamba", "attention"], "num_local_experts": 8},
            "layer_types has layers of linear attention",
        ),
        ({"layer_types": None}, "layer_types has layers of linear attention"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
    ],
)
def test_hybrids_and_experts_are_refused_by_name(fields: dict[str, Any], message: str):
    with pytest.raises(NotImplementedError, match=message) as refused:
        LlamaConfig.from_hf(FIELDS | fields)
    assert "\n" not in str(refused.value)


def test_a_gguf_file_with_the_fields_of_hybrids_computes_what_its_source_does(
    tmp_path: pathlib.Path,
):
    source, path = random_llama(LlamaConfig.from_hf(FIELDS)), tmp_path / "granite.gguf"
    write_gguf(source, path, architecture="granite", fields=OF_HYBRIDS)
    llama, _ = load_llama(path, dtype="float32")
    assert llama.config.num_key_value_heads == 2
    tokens = random_tokens((1, 12))
    wanted = logits(source, tokens)
    assert row_errors(logits(llama, tokens), wanted).max() < 1e-5
    assert row_errors(logits(llama, tokens[:, ::-1]), wanted).max() > 1e-2
    differing = OF_HYBRIDS | {"attention.head_count_kv": [2, 0]}
    write_gguf(source, tmp_path / "differing.gguf", architecture="granite", fields=differing)
    assert "head_count_kv differs by layer" in refusal(tmp_path / "differing.gguf")


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [("granitehybrid", "layers of linear attention"), ("llama4", "attention in chunks")],
)
def test_architectures_without_a_decoder_name_what_is_missing(
    architecture: str, missing: str, tmp_path: pathlib.Path
):
    source = random_llama(LlamaConfig.from_hf(SIZES | {"model_type": "llama"}))
    path = write_gguf(source, tmp_path / "model.gguf", architecture=architecture)
    with pytest.raises(
        NotImplementedError, match=rf"{architecture!r} is not supported \({missing}"
    ):
        read_config(path)
