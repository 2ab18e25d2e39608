"""kvq: each command prints what the library computes, and user errors are one line and exit code
2."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_models import generate, load_llama, right_padded
from kvq_models.llama.checkpoint import read_config
from kvq_tools.cli import (
    console,
    inputs,
    layer_times,
    main,
    one_generation,
    resident,
    text_input,
)
from kvq_tools.cli.console import printable
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.options import demo as demo_options
from kvq_tools.cli.options import values
from kvq_tools.growing_text import UNFINISHED
from tests.kvq_models.checkpoints import PROMPT

CACHE = "kivi:bits=2,recent=8,block=8"
HERE = "native" if dispatch.no_device("native") is None else "xla"  # the reader on this machine
NEW = 24


def generate_arguments(directory, *more):
    return (
        "generate",
        directory,
        "--prompt",
        PROMPT,
        "--cache",
        CACHE,
        "--max-new-tokens",
        NEW,
        "--dtype",
        "float32",
        *more,
    )


def test_commands_do_not_import_each_other():
    folder = pathlib.Path(main.__file__).parent / "commands"
    files = {file: file.read_text(encoding="utf-8") for file in folder.glob("*.py")}
    assert {file.stem for file in files} == {
        "__init__",
        *(command.replace("-", "_") for command in main.COMMANDS),
    }
    found = [
        file.name
        for file, text in files.items()
        if re.search(r"kvq_tools\.cli\.commands|from kvq_tools\.cli import .*commands", text)
    ]
    assert not found, found


# --- generate


def test_generate_json_holds_the_tokens_of_the_library_and_the_bytes_of_its_cache(model, run_json):
    found = run_json(*generate_arguments(model))
    llama, tokenizer = load_llama(model, dtype="float32")
    tokens, lengths = right_padded([tokenizer(PROMPT).input_ids])
    cache = kvq.init_cache(CACHE, llama.config, 1, found["capacity"], "float32")
    size = kvq.size.nbytes(cache)
    out = generate(
        llama, cache, tokens, lengths, max_new_tokens=NEW, eos_ids=llama.config.eos_token_ids
    )
    assert found["tokens"] == np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist(), (
        "generate and kvq generate differ"
    )
    assert found["capacity"] == inputs.round_up(int(lengths[0]) + NEW, 64), (
        "the default capacity is prompt + new, up to a multiple of 64"
    )
    assert found["cache_bytes"] == size
    assert found["bf16_bytes"] == kvq.size.dense_nbytes(llama.config, 1, found["capacity"])
    assert found["ratio"] == found["bf16_bytes"] / found["cache_bytes"]
    assert found["quantized_tokens"] > 0, "the test's windows are small: tokens must have left them"
    assert found["implementation"] == HERE
    assert min(found["prefill_seconds"], found["decode_seconds"], found["compile_seconds"]) > 0


def test_generate_prints_the_same_text_streamed_or_not_and_a_footer_that_agrees_with_json(
    model, run, run_json
):
    expected = run_json(*generate_arguments(model))
    _, plain, _ = run(*generate_arguments(model))
    _, streamed, _ = run(*generate_arguments(model, "--stream"))
    for name, out in (("plain", plain), ("streamed", streamed)):
        text, footer = out.removesuffix("\n").rsplit("\n", 1)
        assert text == printable(expected["text"]), f"{name} text differs from --json"
        numbers = re.search(
            r"for (\d+) tokens, bf16 .* ratio ([\d.]+), .*; (\d+) of (\d+) tokens quantized; (\d+)"
            r" prompt \+ (\d+) new",
            footer,
        )
        assert numbers is not None, f"{name} footer cannot be parsed: {footer}"
        capacity, ratio, quantized, live, prompt, new = (float(n) for n in numbers.groups())
        names = ("capacity", "quantized_tokens", "prompt_tokens", "new_tokens")
        assert (capacity, quantized, prompt, new) == tuple(expected[n] for n in names), (
            f"{name} footer differs from --json"
        )
        assert live == prompt + new
        assert ratio == pytest.approx(expected["ratio"], abs=0.01)
        for part in (
            "tokens/s",
            "compilation",
            f"implementation {HERE}",
            "layers skipped: none",
            f"[cache {CACHE}: ",
        ):
            assert part in footer, f"{name} footer lacks {part!r}"


def test_generate_without_a_tokenizer_takes_ids_and_prints_ids(model, bare, run):
    ids = text_input.load_tokenizer(str(model))(PROMPT).input_ids
    arguments = (
        "generate",
        bare,
        "--prompt-ids",
        ",".join(map(str, ids)),
        *generate_arguments(bare)[4:],
    )
    code, out, _ = run(*arguments)
    printed = [int(part) for part in out.splitlines()[0].split()]
    assert code == 0
    assert len(printed) == NEW, "every generated id is printed"


def test_generate_warns_on_stderr_past_the_trained_positions_and_keeps_stdout_json(
    model, run, monkeypatch
):
    monkeypatch.setattr(one_generation, "load_llama", stop_before_weights)
    code, out, err = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", 300, "--json")
    assert (code, json.loads(out)["error"]) == (2, "weights were read"), "an error is JSON too"
    assert "kvq: warning:" in err
    assert "256 positions" in err


def stop_before_weights(*_, **__):
    raise ValueError("weights were read")


def test_a_chat_template_wraps_the_prompt_as_the_users_turn(model):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    tokenizer = text_input.load_tokenizer(str(model))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if"
        " add_generation_prompt %}<bot>{% endif %}"
    )
    ids = text_input.encode(tokenizer, "hi", chat=True)
    assert tokenizer.decode(ids) == "<user>hi<bot>"
    tokenizer.chat_template = "{{ nothing.there.at_all }}"
    with pytest.raises(console.UserError, match="chat template fails"):
        text_input.encode(tokenizer, "hi", chat=True)


@pytest.mark.parametrize("text", ["plain words", "né à l'été", "smile 😀 日本語"])
def test_a_stream_never_shows_a_part_of_a_character_and_adds_up_to_the_text(model, text):
    tokenizer = text_input.load_tokenizer(str(model))
    prompt = tokenizer(PROMPT).input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stream = Continuation(tokenizer, prompt)
    parts = [stream.push(ids[:n]) for n in range(1, len(ids) + 1)]
    assert not any(UNFINISHED in part for part in parts), (
        f"a part of a character was shown: {parts}"
    )
    assert "".join(parts) + stream.push(ids, last=True) == text
    cut = Continuation(tokenizer, prompt)
    tail = tokenizer("é", add_special_tokens=False).input_ids[:1]
    assert cut.push([*ids, *tail]) == text, "the first byte of a character must be held back"
    assert cut.push([*ids, *tail], last=True) == UNFINISHED, (
        "what never became a character is shown at the end"
    )


# --- memory


def test_memory_counts_the_bytes_of_the_real_cache(model, run_json):
    spec = CACHE
    found = run_json("memory", model, "--cache", spec, "--context", 96, "--batch", 3)
    cache = kvq.init_cache(spec, read_config(model), 3, 96)
    (row,) = found["caches"]
    assert row["cache_bytes"] == kvq.size.nbytes(cache)
    assert sum(part["bytes"] for part in row["components"]) == row["cache_bytes"], (
        "components add up to the cache"
    )
    assert row["ratio"] == kvq.size.dense_nbytes(read_config(model), 3, 96) / row["cache_bytes"]
    assert row["bits_per_element"] == kvq.size.bits_per_element(spec, read_config(model), 96)


def test_memory_finds_the_largest_context_that_fits_and_needs_no_weights(model, tmp_path, run_json):
    shutil.copy(model / "config.json", tmp_path)
    budget = 100_000
    (row,) = run_json("memory", tmp_path, "--cache", CACHE, "--budget", budget)["caches"]
    fitting, above = (
        kvq.size.nbytes(kvq.cache.layout(CACHE, read_config(model), 1, row["largest_context"] + i))
        for i in (0, 1)
    )
    assert fitting <= budget < above
    assert resident.largest_context(kvq.parse(CACHE), read_config(model), 1, "bfloat16", 10) == 0, (
        "nothing fits 10 bytes"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5 MB", 1_500_000), ("4096", 4096), ("2k", 2000), ("1TiB", 2**40)],
)
def test_sizes_are_read_in_powers_of_1000_and_1024(text, size):
    assert values.byte_size(text) == size


# --- methods


def test_methods_lists_every_method_with_its_declared_options(run, run_json):
    found = {method["name"]: method for method in run_json("methods")["methods"]}
    assert list(found) == list(kvq.methods.METHODS)
    _, text, _ = run("methods")
    for name, method in kvq.methods.METHODS.items():
        assert f"{name}: {method.summary}" in text
        for option in found[name]["options"]:
            assert option["name"] in text, f"{name}: option {option['name']} is not printed"
        assert found[name]["presets"] == method.presets
        for preset in method.presets:
            assert f"preset={preset}: {method.presets[preset]}" in text
        for spec, bits in found[name]["average_bits"].items():
            kvq.parse(spec)
            assert 1 < bits <= 16, f"{spec} stores {bits} bits"


# --- demo


def test_demo_measures_every_cache_on_the_shipped_passage(model, run_json, monkeypatch):
    assert f"{layer_times.CONTEXTS[-1] // 1024}K tokens" in demo_options.DESCRIPTION
    monkeypatch.setattr(layer_times, "CONTEXTS", (64, 128))
    tight = "kivi:bits=2,recent=0,block=8"
    found = run_json(
        "demo",
        "--model",
        model,
        "--context",
        96,
        "--new-tokens",
        8,
        "--cache",
        "dense",
        "--cache",
        tight,
    )
    dense, quantized = found["caches"]
    assert (dense["name"], quantized["name"]) == ("dense", tight)
    assert dense["tokens_as_dense"] == 8, "the dense row agrees with itself"
    assert quantized["cache_bytes"] == kvq.size.nbytes(
        kvq.cache.layout(tight, read_config(model), 1, found["capacity"])
    )
    assert found["prompt_tokens"] + found["scored_tokens"] + 1 == found["context"] == 96
    assert dense["perplexity"] != quantized["perplexity"], (
        "the second half was not read from the quantized body"
    )
    assert quantized["ratio"] > 1.5 > dense["ratio"]
    assert all(row["tokens_per_second"] > 0 and len(row["tokens"]) == 8 for row in found["caches"])
    assert {row["implementation"] for row in found["caches"]} == {HERE}
    layer = found["layer"]
    assert [row["name"] for row in layer["caches"]] == ["dense", tight]
    assert all(len(row["milliseconds"]) == len(layer["contexts"]) == 2 for row in layer["caches"])
    assert layer["caches"][0]["ratio"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ratios", "start"),
    [([2, 0.9, 0.8, 0.7], 4096), ([0.5, 1.1, 0.8, 0.7], 16384), ([2, 2, 0.9, 1], None)],
)
def test_a_cache_is_faster_from_where_all_longer_contexts_are(ratios, start):
    assert layer_times.faster_from(ratios) == start


# --- the command itself


WITHOUT_A_CACHE = ("fetch", "lm-eval", "plan", "quantize-weights")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_of_every_command_has_a_sentence_an_example_and_the_grammar(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    grammar = () if command in WITHOUT_A_CACHE else ("SPEC, the argument of --cache",)
    json_option = () if command in main.PASSED_ON else ("--json",)
    for part in ("example", f"kvq {command}", *json_option, *grammar):
        assert part in text, f"kvq {command} --help lacks {part!r}"


def test_help_waits_for_no_jax_and_commands_run_from_an_empty_directory_without_transformers(
    tmp_path,
):
    code = """
import sys
from kvq_tools.cli import main
main.build_parser().format_help()
assert "jax" not in sys.modules, "`kvq --help` imports JAX"
main.main(["methods", "--json"])
assert "jax" in sys.modules, "the check above sees nothing"
assert "transformers" not in sys.modules, "no tokenizer was read"
"""
    paths = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": paths, "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"]


def test_generate_drafts_the_same_text_and_tells_the_steps(model, run, run_json):
    prompt = (
        "generate",
        model,
        "--prompt",
        "the cat is the cat is the cat",
        "--cache",
        "kivi:bits=2",
        "--max-new-tokens",
        24,
    )
    plain, drafted = run_json(*prompt), run_json(*prompt, "--draft", 3)
    assert drafted["tokens"] == plain["tokens"]
    assert (plain["steps"], plain["drafts"], drafted["drafts"]) == (24, None, 3)
    assert drafted["steps"] <= 24
    assert (
        f"24 new tokens in {drafted['steps']} steps with drafts of up to 3"
        in run(*prompt, "--draft", 3)[1]
    )
    for options, message in (
        (("--temperature", "0.5"), "for greedy decoding"),
        (("--mesh", "heads=2"), "on one device"),
    ):
        code, _, errors = run(*prompt, "--draft", 3, *options)
        assert (code, errors.count("\n")) == (2, 1)
        assert message in errors
