"""kvq report: numbers, pictures and page of one small run, checked against plain computations."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib.util
import io
import json
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import EMBEDDED, load_llama
from kvq_models.inference.decoding import decode_step
from kvq_tools import evaluate_caches, tokenize
from kvq_tools.cli import main
from kvq_tools.report import heat, maps, page, quality, schema, times
from kvq_tools.report.cost import grouped
from kvq_tools.report.drawing import DARK, LIGHT, few

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
from PIL import Image, ImageColor

TEXT = (
    "It is a truth universally acknowledged, that the key of the cat is seven, and the key of the"
    " dog is four. " * 3
)
CACHES = ("kivi:bits=2,recent=8,block=8,group_size=8", "int4")
WINDOW, STRIDE, SAMPLE, CONTEXT, STEPS = 32, 16, 24, 32, 2
RUN = ("--window", WINDOW, "--stride", STRIDE, "--limit", 64, "--mode", "fake", "--buckets", 4)


def call(*arguments):
    return main.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a report of the embedded model, as the command writes it."""
    out = tmp_path_factory.mktemp("report")
    (out / "text.txt").write_text(TEXT)
    caches = [part for cache in CACHES for part in ("--cache", cache)]
    request = (
        "report",
        "embedded",
        "--text",
        out / "text.txt",
        *caches,
        *RUN,
        "--contexts",
        CONTEXT,
        "--steps",
        STEPS,
        "--sample",
        SAMPLE,
    )
    assert call(*request, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def report(made):
    return schema.read(made / "report.json")


@pytest.fixture(scope="module")
def model():
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    return llama, tokenize(tokenizer, TEXT).first(64)


# --- numbers


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


def test_sizes_of_layers_add_up_to_the_cache(report, model):
    for cache in report.caches:
        size = kvq.nbytes(kvq.layout(cache.name, model[0].config, 1, WINDOW, "bfloat16"))
        lengths = 4
        assert (
            sum(part.bytes for layer in cache.sizes for part in layer) + lengths
            == size
            == cache.bytes
        ), cache.name
        for layer in cache.sizes:
            drawn = grouped(layer)
            assert sum(drawn.values()) == sum(part.bytes for part in layer), cache.name
            assert drawn["k", "windows"] == sum(
                p.bytes for p in layer if p.side == "k" and p.name in ("ring", "sink")
            ), cache.name


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
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = k[..., :half], k[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1), v


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


def test_an_exact_side_has_no_error(model):
    llama, text = model
    inputs = maps.layer_inputs(llama, jnp.asarray(text.ids[:SAMPLE]))
    mixed = maps.errors(llama, kvq.parse("k=int4+v=dense"), inputs)
    assert all(layer.v_relative == 0 and not any(layer.values) for layer in mixed)
    assert all(layer.k_relative > 0.01 and all(layer.keys) for layer in mixed)


def test_times_are_taken_at_the_context_they_name(report, model, monkeypatch):
    lengths = []

    def seen(llama, cache, token):
        lengths.append(cache.capacity)
        return decode_step(llama, cache, token)

    monkeypatch.setattr(times, "decode_step", seen)
    stepper = times._Stepper(
        times.PreparedCache("int4", kvq.parse("int4"), model[0]), CONTEXT, STEPS
    )
    samples = [stepper.timed() for _ in range(STEPS)]
    assert set(lengths) == {CONTEXT}
    assert int(stepper._cache.lengths[0]) == CONTEXT, "the last step does not fill the context"
    assert all(sample > 0 for sample in samples)
    assert [c.name for c in report.speed.caches] == [
        "dense",
        *CACHES,
    ], "dense is the reference, also where nobody asked for it"
    assert report.speed.contexts == (CONTEXT,)
    assert all(len(samples) == STEPS for c in report.speed.caches for samples in c.samples_ms)


def test_the_front_is_what_nothing_else_beats():
    points = [
        (4.0, 1.0),
        (2.0, 3.0),
        (4.0, 2.0),
        (3.0, 3.0),
        (2.0, 3.0),
        (1.0, None),
        (9.0, 0.5),
        (8.0, 0.5),
    ]
    assert quality.front(points) == (True, True, False, False, True, False, False, True)


def test_layers_and_columns_are_thinned_without_losing_ends_or_outliers():
    assert maps.spread(4) == (0, 1, 2, 3)
    assert maps.spread(80) == (0, 11, 23, 34, 45, 56, 68, 79)
    wide = np.ones((2, 1030))
    wide[1, 777] = 50
    found = heat.pooled(wide, 512)
    assert found.shape[1] <= 512
    assert (found[1] == 50).sum() == 1
    assert (found[0] == 1).all()
    assert few(7, 3) == [0, 5]
    assert few(4) == [0, 1, 2, 3]


# --- report.json


def test_json_gives_back_the_report(report, tmp_path):
    (tmp_path / "again.json").write_text(schema.dump(report))
    assert schema.read(tmp_path / "again.json") == report
    other = dataclasses.replace(report, tokens_of_sample=SAMPLE + 1)
    assert schema.dump(other) != schema.dump(report)


def test_the_committed_report_is_read_and_its_command_is_that_of_the_docs():
    root = pathlib.Path(__file__).parents[3]
    committed, page = (
        schema.read(root / "docs/report/report.json"),
        (root / "docs/commands.md").read_text(encoding="utf-8"),
    )
    asked = re.search(r"^kvq report smollm2 (.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert asked, "docs/commands.md has no command of the report"
    words = set(asked[1].replace("\\\n", " ").split())
    assert words <= set(committed.command.split()), (
        f"{words - set(committed.command.split())} is not what the report was made with"
    )
    assert [c.name for c in committed.caches] == re.findall(r"--cache (\S+)", asked[1])


def broken(fields, path, value):
    *way, last = path
    for part in way:
        fields = fields[part]
    fields[last] = value


WRONG = {
    "another format": (("format",), "kvq report 99", "its format is 'kvq report 99'"),
    "text for a number": (("caches", 0, "kl"), "small", "caches[0].kl must be float, not str"),
    "a fraction of bytes": (("caches", 1, "bytes"), 1.5, "caches[1].bytes must be int, not float"),
    "no list": (("positions",), {}, "positions must be a list"),
    "fields missing": (("text",), {}, "text must be an object with name, tokens"),
    "too few positions": (("caches", 0, "nats"), [1.0], "caches[0].nats has 1 entries, not 4"),
    "too few channels": (
        ("caches", 0, "errors", 1, "keys"),
        [1.0],
        "errors[1].keys has 1 entries, not 128",
    ),
    "no caches": (("caches",), [], "caches is empty"),
    "map of another size": (("tokens_of_sample",), 3, "magnitudes of layer 0: keys has"),
    "map that is no base64": (("magnitudes", 0, "keys", "float16"), "%%%", "report.json"),
    "no samples": (
        ("speed", "caches", 0, "samples_ms"),
        [[]],
        "dense has a context without samples",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_report_is_refused_in_one_line(case, made, tmp_path, run):
    path, value, message = WRONG[case]
    fields = json.loads((made / "report.json").read_text())
    broken(fields, path, value)
    (tmp_path / "report.json").write_text(json.dumps(fields))
    expect_error(
        run("report", "--from", tmp_path / "report.json", "--out", tmp_path / "out"), message
    )
    assert not (tmp_path / "out").exists()


# --- the page


def rows_of(text):
    """{the name of a table's row: its cells}"""
    found = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", text)
    return {html.unescape(name): re.findall(r"<td>(.*?)</td>", cells) for name, cells in found}


def test_the_page_holds_every_cache_and_every_number(made, report):
    text = (made / "index.html").read_text()
    head, rows = html.unescape(text.partition("<main>")[0]), rows_of(text)
    for fact in (
        report.model.name,
        "2,885,888 parameters",
        report.command,
        report.date,
        "64 tokens, 63 of them scored",
        "mode fake",
    ):
        assert fact in head, fact
    assert report.speed.machine.device in text
    exact = [f"{report.exact.perplexity:.3f}", f"{report.exact.bits_per_byte:.4f}"]
    assert rows["model without a cache"][1:3] == exact
    assert rows["model without a cache"][6] == str(
        kvq.dense_nbytes(load_llama(EMBEDDED)[0].config, 1, WINDOW)
    )
    assert rows["model without a cache: nats"] == [f"{n:.4f}" for n in report.exact.nats]
    assert rows["tokens"] == [str(p.tokens) for p in report.positions]
    for n, c in enumerate(report.caches, 1):
        name = f"{n} {c.name}"
        quality_cells = [
            f"{c.perplexity:.3f}",
            f"{c.bits_per_byte:.4f}",
            f"{c.kl:.5f}",
            f"{c.agreement:.2%}",
            str(len(c.flips)),
        ]
        size_cells = [
            str(c.bytes),
            f"{c.ratio:.2f}",
            f"{c.bits_per_element:.2f}",
            f"{c.body_bits_per_element:.2f}",
        ]
        beside = [
            str(c.parameter_bytes),
            str(c.working_bytes),
            f"{c.sink}, {c.recent}, {c.block}",
            str(c.quantized_tokens),
        ]
        assert rows[name][1:] == [*quality_cells, *size_cells, *beside]
        assert rows[f"{name}: nats"] == [f"{v:.4f}" for v in c.nats]
        assert rows[f"{name}: KL"] == [f"{v:.5f}" for v in c.kl_by_position]
        assert rows[f"{name}: flips"] == list(map(str, c.flips_by_position))
        for side in ("k", "v"):
            assert rows[f"{name}: {side}"] == [
                f"{getattr(e, f'{side}_relative'):.4g}" for e in c.errors
            ]
        for part in c.sizes[0]:
            held = [
                next(p.bytes for p in layer if (p.side, p.name) == (part.side, part.name))
                for layer in c.sizes
            ]
            assert rows[f"{name}: {part.side} {part.name}"] == list(map(str, held))
    for c in report.speed.caches:
        samples = c.samples_ms[0]
        assert rows[c.name] == [c.reads, f"{min(samples):.3g}; {np.median(samples):.3g}"]
    assert rows[f"1 {CACHES[0]}"] != rows[f"2 {CACHES[1]}"]


def test_the_page_needs_nothing_else(made):
    text = (made / "index.html").read_text()
    outside = re.findall(
        r"https?:|<script|<link(?! rel=\"icon\" href=\"data:)|@import|@font-face|<iframe", text
    )
    assert not outside, outside
    references = re.findall(r"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)", text)
    foreign = [
        found
        for pair in references
        if (found := "".join(pair)) and not found.startswith(("#", "data:"))
    ]
    assert not foreign, foreign
    assert any(found.startswith("data:image/png") for pair in references for found in pair), (
        "no picture inside the page was looked at"
    )


def test_every_picture_can_be_read(made, report):
    """It has a sentence that says how, words in its place, axes with names, and colours that follow
    the page's theme."""
    text = (made / "index.html").read_text()
    shown = [picture for section in page.sections(report) for picture in section.pictures]
    assert len(shown) == len(re.findall("<figure", text)) == 9
    for picture in shown:
        assert len(picture.reading) > 60, picture.name
        assert html.escape(picture.alt, quote=False) in text.replace("&#39;", "'").replace(
            "&#34;", '"'
        ), picture.name
        axes = picture.draw(LIGHT).axes
        for axis in ("x", "y"):
            named = [name for a in axes if (name := getattr(a, f"get_{axis}label")())]
            assert named, f"{picture.name} has no name on its {axis} axes"
        for theme, png in ((LIGHT, picture.light), (DARK, picture.dark)):
            assert base64.b64encode(png).decode() in text, picture.name
            with Image.open(io.BytesIO(png)) as image:
                assert image.convert("RGB").getpixel((0, 0)) == ImageColor.getrgb(theme["paper"]), (
                    picture.name
                )
        assert (made / f"{picture.name}.png").read_bytes() == picture.light, picture.name


def test_the_page_can_be_made_again_from_json_alone(made, tmp_path):
    assert call("report", "--from", made / "report.json", "--out", tmp_path) == 0
    for name in ("index.html", "report.json", "pareto_kl.png", "magnitudes.png"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name
    fields = json.loads((made / "report.json").read_text())
    fields["caches"][0]["kl"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(fields))
    other = quality.pareto_kl(schema.read(tmp_path / "other.json"))
    assert other.light != (made / f"{other.name}.png").read_bytes(), (
        "a picture does not depend on the numbers"
    )


def test_numbers_that_are_not_finite_and_times_that_were_not_taken_are_left_out(made, report):
    lost = dataclasses.replace(
        report.caches[0], kl=None, perplexity=None, kl_by_position=(None,) * 4, nats=(None,) * 4
    )
    changed = dataclasses.replace(report, caches=(lost, report.caches[1]), speed=None)
    assert quality.front_by(changed, "kl") == (False, True)
    text = page.html(changed, page.sections(changed))
    row = re.search(rf"<tr><th[^>]*>1 {re.escape(CACHES[0])}</th>(.*?)</tr>", text)
    assert row
    assert row[1].startswith("<td></td><td>–</td>"), row[1][:80]
    assert "Decode steps" not in text
    assert "Decode steps" in (made / "index.html").read_text()


def test_a_cache_of_which_nothing_is_read_quantized_is_told_loudly(report):
    assert [c.quantized_tokens for c in report.caches] == [WINDOW - 1] * 2, (
        "in `fake` mode every token is"
    )
    assert quality.warning(report) == ""
    asleep = dataclasses.replace(report.caches[0], quantized_tokens=0, kl=0.0)
    dense = dataclasses.replace(asleep, name="dense", spec="dense")
    changed = dataclasses.replace(report, caches=(asleep, report.caches[1], dense))
    told = (
        f"NOT ONE token was read quantized through {CACHES[0]}: what is measured there is the"
        " full-precision model"
    )
    assert told in page.sections(changed)[0].text
    cells = {row[0]: row[-1] for row in page.numbers(changed).rows}
    assert (cells[f"1 {CACHES[0]}"], cells[f"2 {CACHES[1]}"]) == ("NONE", str(WINDOW - 1))


# --- errors


def expect_error(result, message):
    code, out, err = result
    assert (code, out) == (2, ""), f"{code=} {out=} {err=}"
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("kvq: error: ")
    assert message in lines[0]


BAD = {
    "nothing asked": ((), "needs MODEL and --text and --cache, or --from"),
    "no cache": (("embedded", "--text", "{text}"), "needs --cache, or --from"),
    "both": (("embedded", "--from", "{json}"), "leave out MODEL"),
    "settings of a report that is there": (
        ("--from", "{json}", "--window", "64"),
        "leave out --window",
    ),
    "the same cache twice": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--cache", "int4"),
        "--cache int4 is given twice",
    ),
    "context beyond the model": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "64,4096"),
        "4096 is beyond the 2048",
    ),
    "context too short": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "4"),
        f"no room for {times.STEPS + 1} steps",
    ),
    "context that is no number": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--contexts", "a"),
        "'a' must be an integer",
    ),
    "missing text": (("embedded", "--text", "{text}.none", "--cache", "int4"), "No such file"),
    "window beyond the model": (
        ("embedded", "--text", "{text}", "--cache", "int4", "--window", "4096"),
        "beyond the 2048 positions",
    ),
    "no json": (("--from", "{text}"), "is not JSON"),
    "missing json": (("--from", "{json}.none"), "No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(case, made, tmp_path, run):
    arguments, message = BAD[case]
    filled = [a.format(text=made / "text.txt", json=made / "report.json") for a in arguments]
    expect_error(run("report", *filled, "--out", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused_and_kept(made, tmp_path, run):
    shutil.copy(made / "text.txt", tmp_path / "out")
    expect_error(
        run(
            "report",
            "embedded",
            "--text",
            made / "text.txt",
            "--cache",
            "int4",
            "--out",
            tmp_path / "out",
        ),
        "is a file",
    )
    assert (tmp_path / "out").read_text() == TEXT


def test_without_matplotlib_one_line_says_what_to_install(made, tmp_path, run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "matplotlib" else find(name, *more),
    )
    expect_error(
        run("report", "--from", made / "report.json", "--out", tmp_path),
        "pip install 'kvq-jax[report]'",
    )


def test_json_tells_what_was_written(made, tmp_path, run_json, report):
    found = run_json("report", "--from", made / "report.json", "--out", tmp_path)
    assert sorted(found["files"]) == sorted(str(file) for file in tmp_path.iterdir())
    assert [c["name"] for c in found["caches"]] == list(CACHES)
    assert [c["kl"] for c in found["caches"]] == [c.kl for c in report.caches]
    assert [c["quantized_tokens"] for c in found["caches"]] == [WINDOW - 1] * 2
    assert [c["front_by_kl"] for c in found["caches"]] == list(quality.front_by(report, "kl"))
    assert found["command"].startswith("kvq report embedded --text ")
    assert (
        f"--mode fake --limit 64 --buckets 4 --steps {STEPS} --sample {SAMPLE} --contexts {CONTEXT}"
        in found["command"]
    )
