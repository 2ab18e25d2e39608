"""Published checkpoints that would be read wrongly are refused in one line, with the tensor."""

import pathlib
from typing import Any

import numpy as np
import pytest

from kvq_models.llama.checkpoint import load_llama
from tests.kvq_models.llama.published_cases import CASES, GPTQ, Q_PROJ, of_q_proj, publish
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal


@pytest.mark.parametrize(
    ("case", "end", "change", "message"),
    [
        ("gptq", "scales", lambda a: a[1:], "scales' has shape (1, 64)"),
        ("gptq", "qzeros", lambda a: a.astype(np.int64), "qzeros' is stored as I64; supported: I"),
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
