"""Checkpoints as they are published quantized: each layout loads as the floats that it stands
for."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvq_models.llama.checkpoint import load_llama, open_checkpoint, read_config
from kvq_models.llama.quantized.gptq import Gptq
from tests.kvq_models.llama import published
from tests.kvq_models.llama.published import Encoded
from tests.kvq_models.llama.published_cases import CASES, Q_PROJ, packed_group, publish
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal


@pytest.mark.parametrize("case", CASES)
def test_a_published_checkpoint_loads_as_the_floats_it_stands_for(
    case: str, floats: pathlib.Path, tmp_path: pathlib.Path
):
    original = load_file(floats / "model.safetensors")
    wanted = publish(floats, tmp_path, *CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(wanted)
    for name, tensor in wanted.items():
        read = checkpoint.read(name)
        np.testing.assert_array_equal(read, tensor, err_msg=name)
        assert checkpoint.tensors[name].shape == tensor.shape
        half = (slice(8), slice(1, 9))[: tensor.ndim]
        np.testing.assert_array_equal(checkpoint.parts(name)(half), tensor[half], err_msg=name)
        if name.endswith("_proj.weight"):  # close to what was encoded, and not the same
            error = np.linalg.norm(tensor - original[name]) / np.linalg.norm(original[name])
            assert 1e-3 < error < 0.2, name
            assert read.dtype == np.float32


@pytest.mark.parametrize(
    ("case", "file", "stated"),
    [
        ("gptq_act_order", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True}),
        ("modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
    ],
)
def test_what_a_file_of_its_own_says_about_quantization_is_read(
    case: str, file: str, stated: dict[str, Any], floats: pathlib.Path, tmp_path: pathlib.Path
):
    wanted = publish(floats, tmp_path, *CASES[case])
    change_config(tmp_path, quantization_config=None)
    (tmp_path / file).write_text(json.dumps(stated))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(wanted)
    np.testing.assert_array_equal(checkpoint.read(f"{Q_PROJ}.weight"), wanted[f"{Q_PROJ}.weight"])
    other = {"bits": 3, "w_bit": 3, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / file).write_text(json.dumps(stated | other))
    with pytest.raises(NotImplementedError, match=r"=('3'|'NVFP4'), which is not supported"):
        read_config(tmp_path)
    change_config(tmp_path, quantization_config=CASES[case][0])
    assert read_config(tmp_path), "config.json comes first"


def test_a_gptq_zero_of_zero_borrows_from_its_neighbour():
    """A zero of 0 is stored as -1 on the whole word."""
    weight = np.abs(np.random.default_rng(0).standard_normal((16, 64))).astype(np.float32)
    weight[::3] *= -1
    parts, wanted = published.gptq(weight)
    assert (parts["qzeros"].view(np.uint32) & 0xF == 0xF).any()
    np.testing.assert_array_equal(published.read(Gptq(4, 32, False, True), parts), wanted)


def test_groups_of_modules_have_layouts_of_their_own(floats: pathlib.Path, tmp_path: pathlib.Path):
    quantization = packed_group()
    int8 = CASES["int8_channel"][0]["config_groups"]["group_0"] | {"format": "int-quantized"}
    quantization["config_groups"]["group_1"] = int8 | {"targets": ["re:.*mlp.*"]}
    of_mlp = {(96, 64), (64, 96)}

    def encode(weight: np.ndarray) -> Encoded:
        return CASES["int8_channel" if weight.shape in of_mlp else "int4"][1](weight)

    wanted = publish(floats, tmp_path, quantization, encode)
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


def test_a_tied_head_may_be_quantized(floats: pathlib.Path, tmp_path: pathlib.Path):
    """A checkpoint that does not say if its head is tied has one if a quantized head is stored."""
    wanted = publish(floats, tmp_path, *CASES["gptq"])
    parts, head = published.gptq(wanted["lm_head.weight"])

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{end}": np.ascontiguousarray(a) for end, a in parts.items()})

    change_tensors(tmp_path, change)
    change_config(tmp_path, tie_word_embeddings=None)
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("lm_head.weight"), head)


def test_biases_of_zeros_beside_quantized_weights_are_ignored(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    """AutoGPTQ writes one for every module. One that is not zero is part of another model."""
    name = "model.layers.1.mlp.up_proj.bias"
    zeros = {name: np.zeros(96, np.float16)}
    publish(floats, tmp_path, *CASES["gptq"], lambda tensors: tensors.update(zeros))
    load_llama(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({name: zeros[name] + 1}))
    assert f"the files hold tensor '{name}'" in refusal(tmp_path)


def test_fp8_blocks_are_those_of_transformers(floats: pathlib.Path, tmp_path: pathlib.Path):
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from safetensors.torch import load_file as load_torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    publish(floats, tmp_path, *CASES["fp8_blocks_powers"])
    stored = load_torch(tmp_path / "model.safetensors")
    codes, scales = (stored[f"{Q_PROJ}.{end}"] for end in ("weight", "weight_scale_inv"))
    parts: dict[str, Any] = {"weight": codes, "weight_scale_inv": scales.to(torch.float32)}
    wanted: Any = Fp8Dequantize(None).convert(parts)["weight"]
    read = open_checkpoint(tmp_path).read(f"{Q_PROJ}.weight")
    np.testing.assert_array_equal(read, wanted.numpy())
