"""kvq report: the numbers of one small run, checked against plain computations; what it writes,
reads and refuses."""

import functools
import importlib.util
import json
import operator
import pathlib
import re

import numpy as np
import pytest

from kvq_tools import evaluate_caches
from kvq_tools.report import quality, schema

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from tests.float64 import rotated
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error
from tests.kvq_tools.report.small_report import CACHES, CONTEXT, RUN, SAMPLE, STEPS, STRIDE, WINDOW


def test_quality_is_what_the_evaluation_finds(report, model):
    llama, text = model
    options = {"window": WINDOW, "stride": STRIDE, "mode": "fake", "token_bytes": text.bytes}
    results = evaluate_caches([(llama, cache) for cache in CACHES], text.ids, **options)
    assert [c.name for c in report.caches] == list(CACHES)
    for found, result in zip(report.caches, results, strict=True):
        parts = result.by_position(4)
        assert (found.perplexity, found.kl, found.bits_per_byte) == (
            result.perplexity,
            result.mean_kl,
            result.bits_per_byte,
        ), found.name
        assert found.flips == tuple(result.flips), found.name
        assert found.kl_by_position == tuple(p.kl for p in parts), found.name
        assert found.flips_by_position == tuple(p.flips for p in parts), found.name
    assert report.exact.nats == tuple(p.exact_nats for p in results[0].by_position(4))
    assert report.caches[0].kl != report.caches[1].kl, "both caches have the same numbers"
    assert (report.text.tokens, report.text.scored) == (64, results[0].tokens)


def hand_rows(llama, ids):
    """Keys after RoPE and values [tokens, K, H] of layer 0, in numpy."""
    config, layer = llama.config, llama.layers[0]
    hidden = np.asarray(llama.embed[...], np.float64)[ids]
    x = (
        hidden
        / np.sqrt((hidden**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        * np.asarray(layer.input_norm.scale[...])
    )
    k, v = (x @ np.asarray(p.kernel[...]) for p in (layer.k_proj, layer.v_proj))
    k, v = (rows.reshape(len(ids), config.num_key_value_heads, config.head_dim) for rows in (k, v))
    half = config.head_dim // 2
    angle = np.arange(len(ids))[:, None] * 500000.0 ** (-np.arange(half) / half)
    return rotated(k, angle[:, None]), v


def by_hand_int4(rows):
    """Return (mean error of each channel, relative error): 16 levels between a token's smallest and
    largest entry, whatever its head."""
    flat = rows.reshape(len(rows), -1)
    low = flat.min(1, keepdims=True)
    scale, zero = (
        a.astype(np.float16).astype(float) for a in ((flat.max(1, keepdims=True) - low) / 15, low)
    )
    decoded = np.clip(np.round((flat - zero) / scale), 0, 15) * scale + zero
    return np.abs(decoded - flat).mean(0), np.linalg.norm(decoded - flat) / np.linalg.norm(flat)


def test_magnitudes_and_errors_are_those_of_a_computation_by_hand(report, model):
    llama, text = model
    keys, values = hand_rows(llama, text.ids[:SAMPLE])
    first = report.magnitudes[0]
    assert (first.layer, report.tokens_of_sample) == (0, SAMPLE)
    errors = report.caches[CACHES.index("int4")].errors
    own = (first.keys.matrix(), first.values.matrix())
    for name, packed, rows, found, relative in (
        ("keys", own[0], keys, errors[0].keys, errors[0].k_relative),
        ("values", own[1], values, errors[0].values, errors[0].v_relative),
    ):
        expected = np.abs(rows).reshape(SAMPLE, -1)
        np.testing.assert_allclose(
            packed, expected, rtol=1e-3, atol=1e-3, err_msg=f"magnitudes of {name}"
        )
        by_channel, whole = by_hand_int4(rows)
        np.testing.assert_allclose(found, by_channel, rtol=2e-2, err_msg=f"errors of {name}")
        assert relative == pytest.approx(whole, rel=1e-2), name
    assert not np.allclose(own[0], np.abs(values).reshape(SAMPLE, -1), rtol=0.5), (
        "keys and values are not told apart"
    )
    heads_exchanged = np.roll(by_hand_int4(keys)[0], llama.config.head_dim)
    assert not np.allclose(errors[0].keys, heads_exchanged, rtol=2e-2), "heads are not told apart"
    assert not np.allclose(errors[0].keys, errors[1].keys, rtol=2e-2), "layers are not told apart"


def test_the_front_is_what_nothing_else_beats():
    bits, kl = (4.0, 2.0, 4.0, 3.0, 2.0, 1.0, 9.0, 8.0), (1.0, 3.0, 2.0, 3.0, 3.0, None, 0.5, 0.5)
    best = (True, True, False, False, True, False, False, True)
    assert quality.front(list(zip(bits, kl, strict=True))) == best


def test_a_report_of_before_is_read_and_its_command_names_its_caches():
    old = schema.read(pathlib.Path(__file__).with_name("smollm2_report.json"))
    assert all(cache.window_kl == () for cache in old.caches), "it is of before these numbers"
    assert [cache.name for cache in old.caches] == re.findall(r"--cache (\S+)", old.command)


WRONG = {
    "another format": (("format",), "kvq report 99", "its format is 'kvq report 99'"),
    "text for a number": (("caches", 0, "kl"), "small", "caches[0].kl must be float, not str"),
    "fields missing": (("text",), {}, "text must be an object with name, tokens"),
    "a negative count": (("text", "tokens"), -1, "text.tokens must be a count, not -1"),
    "a count beyond 63 bits": (("caches", 0, "block"), 10**30, "caches[0].block must be a count"),
    "no tokens": (("text", "tokens"), 0, "text.tokens must be at least 1"),
    "too few channels": (("caches", 0, "errors", 1, "keys"), [1.0], "has 1 entries, not 128"),
    "map of another size": (("tokens_of_sample",), 3, "magnitudes of layer 0: keys are"),
    "another mode": (("request", "mode"), "other", "request.mode must be one of decode"),
    "no contexts": (("speed", "contexts"), [], "speed.contexts is empty"),
    "no times": (("speed", "caches"), [], "speed.caches is empty"),
    "no sample of tokens": (("tokens_of_sample",), 0, "tokens_of_sample must be at least 1"),
    "no samples": (("speed", "caches", 0, "samples_ms"), [[]], "has a context without samples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_report_is_refused_in_one_line(case, made, tmp_path, run):
    (*path, last), value, message = WRONG[case]
    fields = json.loads((made / "report.json").read_text())
    functools.reduce(operator.getitem, path, fields)[last] = value
    (tmp_path / "report.json").write_text(json.dumps(fields))
    refused = run("report", "--from", tmp_path / "report.json", "--out", tmp_path / "out")
    assert_one_line_error(refused, message)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_one_line_says_what_to_install(made, tmp_path, run, monkeypatch):
    find = importlib.util.find_spec

    def find_others(name, *more):
        return None if name == "matplotlib" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    refused = run("report", "--from", made / "report.json", "--out", tmp_path)
    assert_one_line_error(refused, "pip install 'kvq-jax[report]'")


def test_json_tells_what_was_written(made, shallow, tmp_path, run_json, report):
    found = run_json("report", "--from", made / "report.json", "--out", tmp_path)
    assert sorted(found["files"]) == sorted(str(file) for file in tmp_path.iterdir())
    assert [c["name"] for c in found["caches"]] == list(CACHES)
    assert [c["kl"] for c in found["caches"]] == [c.kl for c in report.caches]
    assert [c["quantized_tokens"] for c in found["caches"]] == [WINDOW - 1] * 2
    assert [c["front_by_kl"] for c in found["caches"]] == list(quality.front_by(report, "kl"))
    assert found["command"].startswith(f"kvq report {shallow} --text ")
    assert (
        f"--mode fake --limit 64 --buckets 4 --steps {STEPS} --sample {SAMPLE} --contexts {CONTEXT}"
        in found["command"]
    )


@pytest.mark.parametrize(
    ("loop", "item", "whole"),
    [("evaluating", 1, False), ("comparing", 0, True), ("timing", 1, True)],
)
def test_ctrl_c_writes_what_was_complete(made, shallow, run, press_in, tmp_path, loop, item, whole):
    press_in(loop, item)
    sizes = ("--batch", 1, "--contexts", "8,16", "--steps", STEPS, "--sample", SAMPLE)
    asked = ("--text", made / "text.txt", "--cache", CACHES[0], *RUN, *sizes, "--out", tmp_path)
    code, _, err = run("report", shallow, *asked)
    assert code == 130
    assert "interrupted: the numbers are of the windows that were read by then" in err
    written = schema.read(tmp_path / "report.json")
    assert (tmp_path / "index.html").exists()
    assert (written.text.scored == schema.read(made / "report.json").text.scored) is whole
    assert (written.speed and written.speed.contexts) == ((8,) if loop == "timing" else None)


def test_ctrl_c_leaves_an_earlier_report_as_it_was(made, shallow, run, press_in, tmp_path):
    press_in("evaluating", 1)
    earlier = {name: (made / name).read_bytes() for name in ("report.json", "index.html")}
    for name, content in earlier.items():
        (tmp_path / name).write_bytes(content)
    sizes = ("--batch", 1, "--contexts", "none")
    asked = ("--text", made / "text.txt", "--cache", CACHES[0], *RUN, *sizes, "--out", tmp_path)
    code, out, err = run("report", shallow, *asked)
    assert code == 130
    assert err.endswith(f"the earlier report in {str(tmp_path)!r} is as it was\n")
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'partial' / 'index.html'}: ")
    assert {name: (tmp_path / name).read_bytes() for name in earlier} == earlier
    partial, whole = (schema.read(at / "report.json") for at in (tmp_path / "partial", made))
    assert partial.text.scored < whole.text.scored
