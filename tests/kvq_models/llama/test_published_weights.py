"""Checkpoints as they are published quantized: each layout loads as the floats that it stands for,
and what would be read wrongly is refused."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvq_models.llama.checkpoint import load_llama, open_checkpoint, save_llama
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import forward
from tests.kvq_models.checkpoints import SIZES, random_llama, random_tokens, tiny_config
from tests.kvq_models.llama import published
from tests.kvq_models.llama.published import Encoded
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal

Q_PROJ = "model.layers.0.self_attn.q_proj"
FP8, INT8 = ml_dtypes.float8_e4m3fn, np.int8
ALL = 10**6


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with one group of linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    groups = {"config_groups": {"group_0": group}, "format": layout, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors"} | groups


def packed_group(**weights: Any) -> dict[str, Any]:
    fields = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": published.GROUP}
    return compressed("pack-quantized", **fields | {"symmetric": True} | weights)


def scheme(layout: str, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    return compressed(layout, num_bits=8, type=kind, strategy=strategy, **weights)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": published.GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": published.GROUP, "version": "gemm"}
AWQ |= {"zero_point": True, "modules_to_not_convert": ["lm_head"]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
scaled, partial = published.scaled, functools.partial

CASES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Encoded]]] = {
    "fp8_blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},  # cut off at the ends
        partial(scaled, block=(48, 40), scale="weight_scale_inv"),
    ),
    "fp8_blocks_powers": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]},
        partial(
            scaled,
            block=(16, 32),
            scale="weight_scale_inv",
            scale_dtype=ml_dtypes.float8_e8m0fnu,
        ),
    ),
    "fp8_tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(scaled, block=(ALL, ALL), shape=lambda grid: grid.reshape(())),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        partial(scaled, block=(1, ALL), scale_dtype=ml_dtypes.bfloat16),
    ),
    "float_channel": (
        scheme("float-quantized", "float", "channel"),
        partial(scaled, block=(1, ALL), scale_dtype=ml_dtypes.bfloat16),
    ),
    "float_tensor": (
        scheme("float-quantized", "float", "tensor"),
        partial(scaled, block=(ALL, ALL), shape=lambda grid: grid.reshape(1)),
    ),
    "float_block": (
        scheme("float-quantized", "float", "block", block_structure=[16, 32]),
        partial(scaled, block=(16, 32)),
    ),
    "int8_channel": (
        scheme("int-quantized", "int", "channel"),
        partial(scaled, block=(1, ALL), dtype=INT8),
    ),
    "int8_zeros": (
        scheme("int-quantized", "int", "channel", symmetric=False),
        partial(scaled, block=(1, ALL), dtype=INT8, zero=9),
    ),
    "int8_group": (
        scheme("naive-quantized", "int", "group", group_size=32),
        partial(scaled, block=(1, 32), dtype=INT8),
    ),
    "int4": (packed_group(), published.packed),
    "int4_zeros": (packed_group(symmetric=False), partial(published.packed, symmetric=False)),
    "int4_act_order": (
        packed_group(actorder="group"),
        partial(published.packed, act_order=True),
    ),
    "int8_packed": (
        packed_group(num_bits=8, strategy="channel", group_size=None),
        partial(published.packed, bits=8, size=ALL),
    ),
    "awq": (AWQ, published.awq),
    "gptq": (GPTQ, published.gptq),
    "gptq_act_order": (GPTQ | {"desc_act": True}, partial(published.gptq, act_order=True)),
    "gptq_v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        partial(published.gptq, less_one=False),
    ),
    "gptq_8_bits": (GPTQ | {"bits": 8}, partial(published.gptq, bits=8)),
    "nf4": (NF4, published.nf4),
    "nf4_nested": (NF4, partial(published.nf4, nested=True)),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Qwen2 checkpoint in floats, with biases and a head of its own."""
    directory = tmp_path_factory.mktemp("floats")
    save_llama(random_llama(tiny_config("qwen2")), directory)
    return directory


def publish(
    floats: pathlib.Path,
    directory: pathlib.Path,
    quantization: dict[str, Any],
    encode: Callable[[np.ndarray], Encoded],
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
) -> dict[str, np.ndarray]:
    """Write the checkpoint with every projection encoded, then changed. Return the floats that it
    stands for without the change."""
    stored: dict[str, np.ndarray] = {}
    wanted = load_file(floats / "model.safetensors")
    for name, tensor in list(wanted.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        module = name.removesuffix(".weight")
        parts, wanted[name] = encode(tensor)
        stored |= {f"{module}.{end}": np.ascontiguousarray(a) for end, a in parts.items()}
        stored[f"{module}.input_scale"] = np.ones(1, np.float32)
    stored["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    change(stored)
    save_file(stored, directory / "model.safetensors")
    fields = json.loads((floats / "config.json").read_text())
    config = fields | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return wanted


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


@pytest.mark.parametrize("case", ["fp8_blocks", "int8_channel", "int4", "awq", "gptq", "nf4"])
def test_logits_are_those_of_the_dequantized_checkpoint(
    case: str, floats: pathlib.Path, tmp_path: pathlib.Path
):
    wanted = publish(floats, tmp_path, *CASES[case])
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(wanted, plain / "model.safetensors")
    (plain / "config.json").write_text((floats / "config.json").read_text())
    tokens = random_tokens((1, 9))
    got, same, other = (
        np.asarray(_logits(load_llama(directory, dtype="float32")[0], tokens))
        for directory in (tmp_path, plain, floats)
    )
    np.testing.assert_array_equal(got, same)
    assert np.abs(got - other).max() > 1e-3


_logits = jax.jit(forward)


def of_q_proj(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    """Return a function that changes one tensor of the first query projection."""

    def changed(tensors: dict[str, np.ndarray]) -> None:
        name = f"{Q_PROJ}.{end}"
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return changed


@pytest.mark.parametrize(
    ("case", "end", "change"),
    [
        ("gptq", "qzeros", lambda a: a + 1),
        ("gptq", "qweight", lambda a: a ^ 0xF),
        ("gptq_act_order", "g_idx", lambda a: a[::-1].copy()),
        ("awq", "qzeros", lambda a: a ^ 0xF0),
        ("int4_zeros", "weight_zero_point", lambda a: a ^ 1),
        ("int8_zeros", "weight_zero_point", lambda a: a + np.int8(1)),
        ("nf4", "weight", lambda a: (a >> 4) | (a << 4)),
    ],
)
def test_a_changed_part_changes_the_weight(
    case: str, end: str, change: Any, floats: pathlib.Path, tmp_path: pathlib.Path
):
    name = f"{Q_PROJ}.weight"
    wanted = publish(floats, tmp_path, *CASES[case], of_q_proj(end, change))[name]
    assert not np.array_equal(open_checkpoint(tmp_path).read(name), wanted)


def test_zeros_of_the_other_gptq_format_are_another_weight(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    quantization, encode = CASES["gptq"]
    wanted = publish(floats, tmp_path, quantization | {"checkpoint_format": "gptq_v2"}, encode)
    read = open_checkpoint(tmp_path).read(f"{Q_PROJ}.weight")
    scales = load_file(tmp_path / "model.safetensors")[f"{Q_PROJ}.scales"].astype(np.float32)
    shift = np.repeat(scales, published.GROUP, axis=0).T  # zeros are one too small
    np.testing.assert_allclose(read - wanted[f"{Q_PROJ}.weight"], shift, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "end", "change", "message"),
    [
        ("gptq", "scales", lambda a: a[1:], "scales' has shape (1, 64)"),
        (
            "gptq",
            "qzeros",
            lambda a: a.astype(np.int64),
            "qzeros' is stored as I64; supported: I32",
        ),
        ("gptq_act_order", "g_idx", lambda a: a + 1, "g_idx' holds groups 1 to 2, and the scales"),
        ("awq", "qweight", lambda a: a[:, :, None], "qweight' has shape (64, 8, 1)"),
        ("int4", "weight_shape", lambda a: a[::-1] + 8, "weight_shape' says (72, 72)"),
        ("int4", "weight_scale", lambda a: a[:, :1], "weight_packed' has shape (64, 8)"),
        ("fp8_blocks", "weight_scale_inv", lambda a: a[:1], "weight_scale_inv' has shape (1, 2)"),
        ("int8_channel", "weight", lambda a: a.view(np.uint8), "weight' is stored as U8"),
        ("nf4", "weight.absmax", lambda a: a[1:], "weight.absmax' has shape (63,)"),
        (
            "nf4",
            "weight.quant_state.bitsandbytes__nf4",
            lambda a: a[1:],
            "does not state the weight's shape and blocksize",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    case: str, end: str, change: Any, message: str, floats: pathlib.Path, tmp_path: pathlib.Path
):
    publish(floats, tmp_path, *CASES[case], of_q_proj(end, change))
    error = refusal(tmp_path)
    assert message in error
    assert Q_PROJ in error


def test_missing_parts_and_modules_that_are_left_out_are_refused(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    publish(floats, tmp_path, *CASES["gptq_act_order"])
    change_config(tmp_path, quantization_config=GPTQ | {"modules_to_not_convert": ["q_proj"]})
    assert "layers.0.self_attn.q_proj.qweight' is quantized (I32), and" in refusal(tmp_path)
    # a part of a name is not the name
    change_config(tmp_path, quantization_config=GPTQ | {"modules_to_not_convert": ["q_pro", "up"]})
    assert load_llama(tmp_path)
    change_config(tmp_path, quantization_config=GPTQ | {"dynamic": {r"-:.*\.1\..*up_proj": {}}})
    assert "layers.1.mlp.up_proj.qweight" in refusal(tmp_path)
    change_config(tmp_path, quantization_config=CASES["gptq_act_order"][0])
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{Q_PROJ}.g_idx"))
    assert f"the files lack tensor '{Q_PROJ}.g_idx'" in refusal(tmp_path)


def test_groups_of_modules_have_layouts_of_their_own(floats: pathlib.Path, tmp_path: pathlib.Path):
    quantization = packed_group()
    int8 = {"targets": ["re:.*mlp.*"], "format": "int-quantized"}
    int8["weights"] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    quantization["config_groups"]["group_1"] = int8
    quantization["format"] = "pack-quantized"
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
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert not open_checkpoint(tmp_path).config.tie_word_embeddings
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("lm_head.weight"), head)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method='aqlm', which is not supported; supported: unq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method='modelopt'"),
        (GPTQ | {"bits": 3}, "bits='3', which is not supported; supported: 2 or 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (GPTQ | {"group_size": 0}, "group_size='0'"),
        (GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}}, "has dynamic="),
        (AWQ | {"version": "gemv"}, "version='gemv', which is not supported; supported: gemm"),
        (AWQ | {"zero_point": False}, "zero_point='False'"),
        ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, "load_in_4bit='None'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size='[128, 0]'"),
        (packed_group(num_bits=3), "num_bits='3'"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format='nvfp4-pack-quantized'"),
        (packed_group() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (packed_group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (packed_group() | {"ignore": ["re:("]}, "'re:(', which is no regular expression"),
        (["gptq"], "no quant_method"),
    ],
)
def test_what_is_not_read_is_refused_by_name(quantization: Any, message: str):
    fields = SIZES | {"model_type": "llama"}
    with pytest.raises(NotImplementedError) as caught:
        LlamaConfig.from_hf(fields | {"quantization_config": quantization})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scheme_of_the_cache_alone_quantizes_no_weight(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    of_cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    wanted = publish(
        floats, tmp_path, quantization | {"kv_cache_scheme": of_cache}, lambda a: ({"weight": a}, a)
    )
    assert "model.layers.0.self_attn.k_scale" not in open_checkpoint(tmp_path).tensors
    assert set(open_checkpoint(tmp_path).tensors) == set(wanted)


def test_fp8_blocks_are_those_of_transformers(floats: pathlib.Path, tmp_path: pathlib.Path):
    torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
    from safetensors.torch import load_file as load_torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    publish(floats, tmp_path, *CASES["fp8_blocks_powers"])
    stored = load_torch(tmp_path / "model.safetensors")
    of_module = {end: stored[f"{Q_PROJ}.{end}"] for end in ("weight", "weight_scale_inv")}
    of_module["weight_scale_inv"] = of_module["weight_scale_inv"].to(torch.float32)
    wanted = Fp8Dequantize(None).convert(of_module)["weight"]
    read = open_checkpoint(tmp_path).read(f"{Q_PROJ}.weight")
    np.testing.assert_array_equal(read, wanted.numpy())
