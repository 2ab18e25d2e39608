"""Checkpoints that read images, too: their language models load, alone, with the same logits."""

import copy
import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import CheckpointError, load_llama, read_config, save_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, forward
from kvq_models.llama.text_part import PARTS
from tests.kvq_models.checkpoints import (
    SIZES,
    YARN,
    model,
    random_tokens,
    randomize,
    row_errors,
    tiny_config,
    torch_logits,
)
from tests.kvq_models.llama.published_cases import CASES as PUBLISHED
from tests.kvq_models.llama.published_cases import packed_group, publish
from tests.kvq_models.llama.saved_checkpoint import change_config

TOLERANCE = 1e-4
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14, "hidden_size": 32}
IMAGE_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
# fields beside the language model's SIZES, and those of the rest of the checkpoint
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True},
        {
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 16}},
    ),
    "ministral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5},
        },
        {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 16}},
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"rope_parameters": SECTIONS},
        {"vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 64}, **IMAGE_TOKENS},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"rope_parameters": SECTIONS},
        {"vision_config": QWEN_VISION | {"out_hidden_size": 64}, **IMAGE_TOKENS},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"head_dim": 16, "rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        {
            "vision_config": QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            **IMAGE_TOKENS,
        },
    ),
}
jitted_forward = jax.jit(forward)


def build(directory: pathlib.Path, name: str) -> Any:
    """Save a random checkpoint that reads images with transformers, and return its torch model."""
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, text, whole = copy.deepcopy(CASES[name])
    tied = text.get("tie_word_embeddings", False)
    config = AutoConfig.for_model(
        model_type, text_config=SIZES | text, tie_word_embeddings=tied, **whole
    )
    reference = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomize(reference)
    reference.save_pretrained(directory)
    return reference


def saved(directory: pathlib.Path, prefix: str, **fields: Any) -> Llama:
    """Save a random language model as a part of a checkpoint. Returns the model."""
    llama = model("mistral", **fields)
    save_llama(llama, directory)
    make_part(directory, prefix)
    return llama


def make_part(directory: pathlib.Path, prefix: str) -> None:
    """Make a checkpoint of a language model a part of one with a tensor that reads images."""
    file = directory / "model.safetensors"
    tensors = {
        (name if name == "lm_head.weight" else prefix + name.removeprefix("model.")): tensor
        for name, tensor in load_file(file).items()
    }
    tensors["vision_tower.patch_conv.weight"] = np.ones((4, 4), np.float32)
    save_file(tensors, file)
    text = json.loads((directory / "config.json").read_text())
    quantization = text.pop("quantization_config", None)
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    whole["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("name", CASES)
def test_the_language_model_of_a_checkpoint_has_the_logits_of_the_whole_on_a_text(name, tmp_path):
    reference = build(tmp_path, name)
    (file,) = tmp_path.glob("*.safetensors")
    assert any("vis" in one for one in load_file(file)), "the checkpoint reads no images"
    llama, _ = load_llama(tmp_path, dtype="float32")
    tokens = random_tokens((2, 40))
    want = torch_logits(reference, tokens)
    errors = row_errors(jitted_forward(llama, tokens), want)
    assert errors.max() < TOLERANCE, f"{name}: relative error {errors.max():.2e}"
    control = row_errors(jitted_forward(llama, tokens), np.roll(want, 1, axis=1)).max()
    assert control > 10 * TOLERANCE, "the comparison sees no difference"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_all_versions_of_transformers_are_read(prefix, tied, tmp_path):
    llama = saved(tmp_path, prefix, tie_word_embeddings=tied)
    loaded, _ = load_llama(tmp_path, dtype="float32")
    assert loaded.config == llama.config
    tokens = random_tokens((1, 12))
    want, got = jitted_forward(llama, tokens), jitted_forward(loaded, tokens)
    assert float(jnp.abs(want).max()) > 0
    np.testing.assert_array_equal(want, got, err_msg=prefix)


def test_what_is_saved_is_the_language_model_alone(tmp_path):
    llama = saved(tmp_path / "whole", "language_model.model.")
    save_llama(load_llama(tmp_path / "whole", dtype="float32")[0], tmp_path / "alone")
    assert read_config(tmp_path / "alone") == llama.config
    names = set(load_file(tmp_path / "alone" / "model.safetensors"))
    assert names == {weight.name for weight in hf_names.weights(llama).values()}


def test_a_head_of_its_own_is_read_whatever_the_configuration_of_the_whole_says(tmp_path):
    llama = saved(tmp_path, "language_model.model.", tie_word_embeddings=False)
    change_config(tmp_path, tie_word_embeddings=True)  # transformers' default for mistral3
    loaded, _ = load_llama(tmp_path, dtype="float32")
    assert not loaded.config.tie_word_embeddings
    np.testing.assert_array_equal(loaded.head.kernel[...], llama.head.kernel[...])


def test_a_quantized_part_is_read_with_the_names_that_its_configuration_has(tmp_path):
    for name in ("floats", "whole"):
        save_llama(model("mistral"), tmp_path / name)
    quantization = packed_group() | {"ignore": ["re:.*vision_tower.*", "language_model.lm_head"]}
    (group,) = quantization["config_groups"].values()
    group["targets"] = [r"re:language_model\.model\.layers\.\d+\..*_proj"]
    encode = PUBLISHED["int4"][1]
    wanted = publish(tmp_path / "floats", tmp_path / "whole", quantization, encode)
    make_part(tmp_path / "whole", "language_model.model.")
    loaded, _ = load_llama(tmp_path / "whole", dtype="float32", weights="dense")
    for path, weight in hf_names.weights(loaded).items():
        want = wanted[weight.name].T if weight.transpose else wanted[weight.name]
        np.testing.assert_array_equal(weight.leaf, want, err_msg=path)
    assert (np.asarray(loaded.layers[0].q_proj.kernel[...]) != 0).any()
    group["targets"] = [r"re:model\.layers\.\d+\..*_proj"]
    change_config(tmp_path / "whole", quantization_config=quantization)
    with pytest.raises(CheckpointError, match=r"weight_(packed|scale|shape)'"):
        load_llama(tmp_path / "whole", dtype="float32")


# as in config.json of google/gemma-3-4b-it and of google/gemma-3-27b-it
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA3_27B = GEMMA3_4B | {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
}


@pytest.mark.parametrize("text", [GEMMA3_4B, GEMMA3_27B], ids=["4b", "27b"])
def test_fields_that_a_gemma_3_with_images_leaves_out_are_those_of_transformers(text):
    transformers = pytest.importorskip("transformers")
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {},
    }
    config = LlamaConfig.from_hf(whole)
    theirs = transformers.Gemma3TextConfig(**text).to_dict() | {"eos_token_id": [1, 106]}
    stated = LlamaConfig.from_hf(theirs | {"architectures": ["Gemma3ForCausalLM"]})
    special = {"bos_token_id": None, "pad_token_id": None}  # which the tokenizer has
    assert config == dataclasses.replace(stated, **special)
    assert (config.vocab_size, len(config.windowed_layers)) in ((262208, 29), (262208, 52))


def test_a_configuration_of_before_text_config_is_the_language_models_own():
    fields = SIZES | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    old = LlamaConfig.from_hf(fields | {"rope_scaling": rope})
    assert old == tiny_config("qwen2")
    with pytest.raises(NotImplementedError, match="rope_type='mrope'"):
        LlamaConfig.from_hf(SIZES | {"model_type": "qwen2", "rope_scaling": rope})


def test_a_window_of_null_is_none_and_not_the_familys_default():
    text = SIZES | {"model_type": "mistral", "max_position_embeddings": 8192}
    whole = {"model_type": "mistral3", "text_config": text | {"sliding_window": None}}
    assert LlamaConfig.from_hf(whole).sliding_window is None
    assert LlamaConfig.from_hf(whole | {"text_config": text}).sliding_window == 4096


def test_the_configuration_alone_is_read(tmp_path):
    llama = saved(tmp_path, "language_model.model.")
    (tmp_path / "model.safetensors").unlink()
    assert read_config(tmp_path).num_hidden_layers == llama.config.num_hidden_layers


def test_every_kind_of_checkpoint_is_compared_with_transformers():
    assert {model_type for model_type, *_ in CASES.values()} == set(PARTS)
