"""Requests to calibrate that cannot be met are one line, and leave nothing behind."""

import dataclasses
import json
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.calibration.store import Identity
from kvq_models.llama import hf_names
from tests.kvq_models.calibration_runs import LENGTH, SPEC, TEXT, one_line, run
from tests.kvq_models.checkpoints import model, random_llama, tiny_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "short text": (
        {"text": TEXT[:LENGTH]},
        "a length of 20 needs a text of at least 21 tokens, and this one has 20",
    ),
    "unknown token": (
        {"text": [5] * 30 + [96]},
        "token id 96 at position 30 is outside the vocabulary of 96",
    ),
    "no tokens": ({"text": np.full(30, 0.5)}, "token_ids must be integers, got 0.5 of float64"),
    "a cache that needs none": ({"spec": "kivi"}, "'kivi' needs no calibration"),
    "a cache that does not fit": (
        {"spec": "k=kvquant:bits=2,outliers=0.1+v=kivi:group_size=24+cache:block=8"},
        "group_size=24",
    ),
    "sinks as long as samples": (
        {"spec": f"{SPEC},sink=20"},
        "a length of 20 leaves no token to calibrate with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_met_is_one_line_and_leaves_nothing(case, tmp_path):
    options, message = REFUSED[case]
    one_line(message, run, tmp_path / "w", **options)
    assert not list(tmp_path.iterdir()), "something was written"


def test_a_disk_without_space_is_one_line_that_names_both_sizes(tmp_path, monkeypatch):
    heads, kv_heads, width = 4, 2, 16
    rows = 4 * LENGTH * kv_heads * width  # keys, values and their gradients
    queries = kv_heads * width**2 + LENGTH * heads * width  # their moments, and the last ones
    need = 2 * 3 * (rows + queries) * 4 / 2**30  # layers, samples, bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(need * 2**30) - 1))
    one_line("3 samples of 20 tokens need 0.00 GiB", run, tmp_path / "w", error=OSError)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(need * 2**30)))
    run(tmp_path / "w")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    run(tmp_path / "w")  # nothing is left to record


OTHER_RUNS = {
    "model": ({"llama": random_llama(tiny_config(), seed=1)}, "model_fingerprint"),
    "text": ({"text": TEXT + 0 * TEXT[::-1] + (TEXT == 3)}, "tokens_sha256"),
    "seed": ({"seed": 7}, "seed is 0 there and 7 here"),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_a_work_directory_of_another_run_is_refused_by_name(case, work):
    options, message = OTHER_RUNS[case]
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    one_line(message, run, work, **options)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before, (
        "another run's directory was touched"
    )


def test_a_directory_that_is_no_work_directory_is_refused(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"x")
    one_line("is not empty", run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
    for text, message in (
        ("{", "cannot be read"),
        ('{"format": "kvq-calibration-work-0", "identity": {}, "losses": []}', "cannot be read"),
    ):
        (tmp_path / "state.json").write_text(text)
        one_line(message, run, tmp_path)
    identity = dataclasses.asdict(Identity("", "", 1, 1, 0, "float32"))
    (tmp_path / "state.json").write_text(
        json.dumps({"format": "kvq-calibration-work-0", "identity": identity, "losses": []})
    )
    one_line("another version", run, tmp_path)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("layers.1.v_proj.kernel", "layer 1, v: the values"),
        ("head.kernel", "layer 1, k: the gradients in the keys"),
    ],
)
def test_what_is_not_finite_names_its_layer_and_side(path, place, tmp_path):
    llama = model()
    broken = hf_names.weights(llama)[path].leaf.at[0, 0].set(jnp.nan)
    one_line(place, run, tmp_path / "w", llama=hf_names.replace_weights(llama, {path: broken}))
