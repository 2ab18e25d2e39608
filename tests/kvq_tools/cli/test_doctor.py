"""`kvq doctor`: warnings that a config or a key bias implies, exact layers, and kernels."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from kvq_models import EMBEDDED, save_llama
from kvq_models.llama.hf_directory import HfDirectory
from kvq_tools.cli import doctor_facts
from tests.kvq_models.checkpoints import random_llama, tiny_config


def save_qwen2(directory, peak):
    """Save a two-layer Qwen2 with one channel of `peak` in the key bias of its first layer."""
    save_llama(random_llama(tiny_config("qwen2")), directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[doctor_facts.BIAS_NAME.format(0)][3] = peak
    save_file(tensors, directory / "model.safetensors")


def test_doctor_warns_of_a_large_key_bias_where_key_groups_are_per_token_and_reads_no_other_tensor(
    tmp_path, run_json, monkeypatch
):
    save_qwen2(tmp_path, 90.0)
    read, names = HfDirectory.read, []
    monkeypatch.setattr(
        HfDirectory, "read", lambda self, name: names.append(name) or read(self, name)
    )
    options = "sink=0,recent=8,block=8"
    hit = run_json("doctor", tmp_path, "--cache", f"innerq:normalize=false,{options}")
    assert [w for w in hit["warnings"] if w.startswith("layer 0: k_proj bias up to 90")], hit[
        "warnings"
    ]
    assert not [w for w in hit["warnings"] if w.startswith("layer 1")], "layer 1 has a small bias"
    assert hit["layers"][0]["k_proj_bias"]["largest"] == 90.0
    assert set(names) == {doctor_facts.BIAS_NAME.format(layer) for layer in (0, 1)}
    spared = run_json("doctor", tmp_path, "--cache", "kivi:recent=8,block=8")
    assert not [w for w in spared["warnings"] if "k_proj bias" in w], (
        "per-channel keys give each channel its own range"
    )


@pytest.mark.parametrize("cache", ["innerq:normalize=false,recent=8,block=8", "int4", "fp8"])
def test_doctor_says_that_a_key_bias_is_not_finite_and_draws_nothing_from_it(
    tmp_path, run, run_json, cache
):
    save_qwen2(tmp_path, float("nan"))
    found = run_json("doctor", tmp_path, "--cache", cache)
    about = [warning for warning in found["warnings"] if "k_proj bias" in warning]
    assert about == ["layer 0: the k_proj bias is not finite"]
    assert found["layers"][0]["k_proj_bias"] == dict.fromkeys(("norm", "largest", "median"))
    assert found["facts"]["k_proj_bias"].startswith("yes; not finite in layer 0")
    if cache == "int4":
        assert "│     0 │ " in (text := run("doctor", tmp_path, "--cache", cache)[1])
        assert "nan" not in text


def test_doctor_tells_which_layers_are_exact_and_why(tmp_path, run, run_json):
    save_llama(random_llama(tiny_config()), tmp_path)
    command = f"doctor {tmp_path} --cache kivi:bits=4@1/2,recent=8,block=8,skip_layers=0"
    found = run_json(command)
    first, second = found["layers"]
    assert (first["quantized"], first["reason"]) == (False, "skip_layers names it")
    assert (second["quantized"], second["reason"]) == (True, None)
    assert second["k"]["bits"] == second["v"]["bits"] == 4, "the per-layer value is resolved"
    assert "skip_layers names it" in run(command)[1]


@pytest.mark.parametrize(
    ("fields", "cache", "warning"),
    [
        ({}, "kivi", "nothing is quantized within 64 tokens"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "dense",
            "base is frozen from the capacity (64)",
        ),
        ({"head_dim": 24}, "kivi:recent=8,block=8,group_size=8", "fits no GPU kernel"),
        ({"head_dim": 8}, "kivi:recent=8,block=8", "padded to"),
    ],
)
def test_doctor_warns_of_what_a_config_implies(tmp_path, run_json, fields, cache, warning):
    config = tiny_config(**fields)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    warnings = run_json("doctor", tmp_path, "--cache", cache)["warnings"]
    assert any(warning in w for w in warnings), warnings


def test_doctor_tells_whether_kernels_can_read_a_cache(run, run_json):
    served = run_json("doctor", EMBEDDED, "--cache", "kivi:bits=4")
    assert {layer["no_kernel"] for layer in served["layers"]} == {None}
    spec = "kivi:bits=4,group_size=16"
    refused = run_json("doctor", EMBEDDED, "--cache", spec)
    reason = "k: blocks of 16 tokens; kernels read spans of 32"
    assert {layer["no_kernel"] for layer in refused["layers"]} == {reason}
    text = " ".join(run("doctor", EMBEDDED, "--cache", spec)[1].split())
    assert "XLA: k: blocks of 16 tokens" in text
