"""Published checkpoints that would be read wrongly are refused in one line, with the tensor."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest

from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.quantized.quantization_config import quantization_of
from tests.kvq_models.llama.published_cases import CASES, GPTQ, Q_PROJ, of_q_proj, publish
from tests.kvq_models.llama.saved_checkpoint import change_config, change_tensors, refusal

FP8 = {"quant_method": "fp8"}


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


def test_scales_of_what_is_no_attention_are_not_passed_over(
    floats: pathlib.Path, tmp_path: pathlib.Path
):
    name = "model.layers.0.mlp.v_scale"
    publish(floats, tmp_path, *CASES["gptq"], lambda t: t.update({name: np.ones(96, np.float32)}))
    assert f"the files hold tensor '{name}', for which the model" in refusal(tmp_path)


MODULES = ("lm_head", "model.layers.18.mlp.gate", "model.layers.2.self_attn.q_proj", "visual.0.up")
PATTERNS = (
    *("lm_head", ".*lm_head", "re", "visual.*|lm_head$", "^model", "l$|.*gate$", "(?:a|lm)_?head"),
    *(r".*\.\d\..*", r".*\.(?:1[0-9])\..*gate", "[^m].*", r".+\.(q|k|v)_proj", r"(\w+\.)+q_proj$"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_names_the_modules_that_python_would_match(pattern: str):
    stated = quantization_of({"quantization_config": FP8 | {"ignore": [f"re:{pattern}"]}})
    assert stated is not None
    for module in MODULES:
        assert stated.ignores(module) == bool(re.match(pattern, module)), module


def test_an_expression_takes_no_longer_than_the_name_is_long():
    for pattern in (r"re:(\w+|\.)+,", "re:(.*)*,", f"re:{'.*' * 50},", f"re:{'(m|m)' * 50},"):
        stated = quantization_of({"quantization_config": FP8 | {"ignore": [pattern]}})
        assert stated is not None
        assert not stated.ignores("m" * 1000)
