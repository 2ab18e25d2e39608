"""Tiny checkpoints in every published layout, each with its quantization_config."""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.kvq_models.llama import published
from tests.kvq_models.llama.published import Encoded

Q_PROJ = "model.layers.0.self_attn.q_proj"
INT8 = np.int8
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
            scaled, block=(16, 32), scale="weight_scale_inv", scale_dtype=ml_dtypes.float8_e8m0fnu
        ),
    ),
    "fp8_tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(scaled, block=(ALL, ALL), shape=lambda grid: grid.reshape(())),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
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
    "int4_old_zeros": (
        packed_group(symmetric=False),
        partial(published.packed, symmetric=False, packed_zeros=False),
    ),
    "int4_act_order": (packed_group(actorder="group"), partial(published.packed, act_order=True)),
    "int8_packed": (
        packed_group(num_bits=8, strategy="channel", group_size=None),
        partial(published.packed, bits=8, size=ALL),
    ),
    "awq": (AWQ, published.awq),
    "gptq": (GPTQ, published.gptq),
    "gptq_act_order": (GPTQ | {"desc_act": True}, partial(published.gptq, act_order=True)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(published.gptq, less_one=False)),
    "gptq_8_bits": (GPTQ | {"bits": 8}, partial(published.gptq, bits=8)),
    "nf4": (NF4, published.nf4),
    "nf4_nested": (NF4, partial(published.nf4, nested=True)),
}


def publish(
    floats: pathlib.Path,
    directory: pathlib.Path,
    quantization: dict[str, Any],
    encode: Callable[[np.ndarray], Encoded],
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
) -> dict[str, np.ndarray]:
    """Write a checkpoint with every projection encoded, then changed. Return the floats that it
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


def of_q_proj(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    """Return a function that changes one tensor of the first query projection."""

    def changed(tensors: dict[str, np.ndarray]) -> None:
        name = f"{Q_PROJ}.{end}"
        tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return changed
