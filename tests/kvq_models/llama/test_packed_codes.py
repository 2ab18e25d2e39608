"""Codes of AWQ, GPTQ, compressed-tensors, FP8 and NF4 stay packed: the same values as dequantized
ones, the same logits, and what has no packed matrix is dequantized."""

import dataclasses
import functools
import pathlib
import shutil
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvq_jax as kvq
from kvq_models.calibration.fingerprint import partial_fingerprint, partial_fingerprint_of
from kvq_models.llama import packed_loading, packed_weights
from kvq_models.llama.checkpoint import CheckpointError, load_llama, open_checkpoint, save_llama
from kvq_models.llama.gguf_blocks import matrix_of_codes
from kvq_models.llama.model import forward
from kvq_models.llama.packed_loading import dense_llama
from kvq_models.llama.quantized.groups import GroupedCodes
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config
from tests.kvq_models.llama import published
from tests.kvq_models.llama.published_cases import (
    ALL,
    CASES,
    GPTQ,
    INT8,
    packed_group,
    publish,
    scheme,
)

BFLOAT16 = ml_dtypes.bfloat16
GROUP_BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 32]}
DEQUANTIZED = (
    *("gptq_act_order", "gptq_8_bits", "int4_act_order", "int8_zeros"),
    "fp8_blocks",  # of 40 inputs
)
# other names of fp8; gptq_v2 differs in what `grouped` adds to zeros, for dense weights too
ALIKE = ("float_channel", "float_tensor", "float_block", "modelopt", "gptq_v2")
PACKED: dict[str, Any] = {
    **{name: case for name, case in CASES.items() if name not in (*DEQUANTIZED, *ALIKE)},
    "int8_channel_bf16": (
        scheme("int-quantized", "int", "channel"),
        functools.partial(published.scaled, block=(1, ALL), dtype=INT8, scale_dtype=BFLOAT16),
    ),
    "int4_channel": (  # all inputs of a channel share one scale
        packed_group(strategy="channel", group_size=None),
        functools.partial(published.packed, size=ALL),
    ),
    "fp8_blocks_cut_off": (
        GROUP_BLOCKS,
        functools.partial(published.scaled, block=(48, 32), scale="weight_scale_inv"),
    ),
}
PROJECTIONS = 7
_logits = jax.jit(forward)


def of_codes(llama: Any) -> list[Any]:
    leaves = jax.tree.leaves(llama, is_leaf=packed_weights.is_packed)
    return [leaf for leaf in leaves if packed_weights.is_packed(leaf) and leaf.bits < 16]


@pytest.mark.parametrize("case", PACKED)
def test_codes_keep_their_values_and_compute_the_same_logits(
    case: str, floats: pathlib.Path, tmp_path: pathlib.Path
):
    publish(floats, tmp_path, *PACKED[case])
    packed, dense = (
        load_llama(tmp_path, dtype="float32", weights=how)[0] for how in ("packed", "dense")
    )
    projections = PROJECTIONS - (1 if "nf4" in case else 0)  # 96 inputs are no runs of 64
    assert len(of_codes(packed)) == projections * packed.config.num_hidden_layers
    bits = 8 if "8" in case or "fbgemm" in case else 4
    assert {leaf.bits for leaf in of_codes(packed)} == {bits}
    assert packed_loading.fingerprint(packed) == kvq.files.fingerprint(dense)
    assert partial_fingerprint(packed) == partial_fingerprint(dense)
    assert partial_fingerprint_of(open_checkpoint(tmp_path)) == partial_fingerprint(dense)
    tokens = random_tokens((1, 6))
    wanted = _logits(dense, tokens)
    assert row_errors(_logits(packed, tokens), wanted).max() < 1e-5
    other = load_llama(floats, dtype="float32")[0]
    assert row_errors(_logits(other, tokens), wanted).min() > 1e-3, "unquantized weights pass"
    default = load_llama(tmp_path, dtype="float32")[0]
    assert bool(of_codes(default)) == (packed_weights.unavailable() is None)


@pytest.mark.parametrize("case", DEQUANTIZED)
def test_other_codes_are_dequantized(case: str, floats: pathlib.Path, tmp_path: pathlib.Path):
    publish(floats, tmp_path, *CASES[case])
    assert not of_codes(load_llama(tmp_path, dtype="float32")[0])


def test_experts_are_quantized_beside_their_router_and_stay_packed(tmp_path: pathlib.Path):
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = tiny_config("qwen3_moe", head_dim=16, norm_topk_prob=True, **fields)
    original, floats = tmp_path / "original", tmp_path / "floats"
    save_llama(random_llama(config), original)
    quantization = GPTQ | {"modules_to_not_convert": ["mlp.gate"]}
    wanted = publish(original, tmp_path, quantization, published.gptq)
    shutil.copytree(original, floats)
    save_file(wanted, floats / "model.safetensors")
    packed, dense = (
        load_llama(tmp_path, dtype="float32", weights=how)[0] for how in ("packed", "dense")
    )
    plain = load_llama(floats, dtype="float32")[0]
    jax.tree.map(np.testing.assert_array_equal, dense, plain)
    assert any(leaf.ndim == 3 for leaf in of_codes(packed))
    jax.tree.map(np.testing.assert_array_equal, dense_llama(packed), dense)
    tokens = random_tokens((1, 6))
    assert row_errors(_logits(packed, tokens), _logits(dense, tokens)).max() < 1e-5


def test_experts_that_are_not_stored_alike_are_refused_in_a_line():
    half = GroupedCodes(
        np.zeros((32, 64), np.uint8), np.ones((32, 2), np.float16), np.zeros((32, 2), np.uint8), 4
    )
    matrix, finite = matrix_of_codes([half, half], "float32")
    assert finite
    assert matrix.shape == (64, 64)
    other = dataclasses.replace(half, scales=half.scales.astype(BFLOAT16))
    with pytest.raises(CheckpointError, match="load them with weights='dense'"):
        matrix_of_codes([half, other], "float32")
