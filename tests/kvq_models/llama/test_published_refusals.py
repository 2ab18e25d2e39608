"""Published checkpoints that would be read wrongly are refused in one line, with the tensor or the
setting."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from tests.kvq_models.checkpoints import SIZES
from tests.kvq_models.llama.published_cases import (
    AWQ,
    CASES,
    GPTQ,
    Q_PROJ,
    compressed,
    of_q_proj,
    packed_group,
    publish,
)
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal


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
    load_llama(tmp_path)
    change_config(tmp_path, quantization_config=GPTQ | {"dynamic": {r"-:.*\.1\..*up_proj": {}}})
    assert "layers.1.mlp.up_proj.qweight" in refusal(tmp_path)
    change_config(tmp_path, quantization_config=CASES["gptq_act_order"][0])
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{Q_PROJ}.g_idx"))
    assert f"the files lack tensor '{Q_PROJ}.g_idx'" in refusal(tmp_path)


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
        (GPTQ | {"modules_to_not_convert": 3}, "has modules_to_not_convert='3'"),
        (GPTQ | {"dynamic": [1]}, "has dynamic='[1]'"),
        (compressed("dense") | {"config_groups": {"g": {"weights": 3}}}, "has weights='3'"),
        (compressed("dense") | {"config_groups": [3]}, "has config_groups='[3]'"),
        (AWQ | {"modules_to_not_convert": [None]}, "has modules_to_not_convert='[None]'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(quantization: Any, message: str):
    fields = SIZES | {"model_type": "llama"}
    with pytest.raises(NotImplementedError) as caught:
        LlamaConfig.from_hf(fields | {"quantization_config": quantization})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
