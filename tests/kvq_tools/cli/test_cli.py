"""kvq: each command prints what the library computes, and user errors are one line and exit code
2."""

import json
import re
import signal
from argparse import ArgumentTypeError

import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_models import generate, load_llama, right_padded
from kvq_models.llama.checkpoint import read_config
from kvq_tools.cli import inputs, layer_times, one_generation, text_input
from kvq_tools.cli.console import printable
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.options import demo as demo_options
from kvq_tools.cli.options import values
from kvq_tools.cli.timed import TimedGeneration
from tests.kvq_models.checkpoints import PROMPT

CACHE = "kivi:bits=2,recent=8,block=8"
HERE = "native" if dispatch.no_device("native") is None else "xla"  # the reader on this machine
NEW = 24


def generate_command(directory):
    options = f"--cache={CACHE} --max-new-tokens={NEW} --dtype=float32"
    return f"generate {directory} --prompt='{PROMPT}' {options}"


# --- generate


def test_generate_json_holds_the_tokens_of_the_library_and_the_bytes_of_its_cache(model, run_json):
    found = run_json(generate_command(model))
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
    assert found["capacity"] == inputs.rounded_capacity(int(lengths[0]) + NEW), (
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
    expected = run_json(generate_command(model))
    _, plain, _ = run(generate_command(model))
    _, streamed, _ = run(generate_command(model), "--stream")
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
        facts = (f"implementation {HERE}", "layers skipped: none", f"[cache {CACHE}: ")
        for part in ("tokens/s", "compilation", *facts):
            assert part in footer, f"{name} footer lacks {part!r}"


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("options", [(), ("--stream",), ("--json",)])
def test_ctrl_c_leaves_generate_with_the_text_so_far(model, run, run_json, monkeypatch, options):
    whole = run_json(generate_command(model))
    advance, calls = TimedGeneration._advance, []

    def pressing(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(self, *arguments)

    monkeypatch.setattr(TimedGeneration, "_advance", pressing)
    monkeypatch.setattr(one_generation, "SEGMENT_SECONDS", 1e-9)  # as if a step took long
    code, out, err = run(generate_command(model), *options)
    assert (code, len(calls)) == (130, 2)
    line = err.splitlines()[-1]
    count = int(
        re.fullmatch(rf"kvq: interrupted: the text has (\d+) of at most {NEW} tokens", line)[1]
    )
    assert 1 < count < NEW
    if "--json" in options:
        found = json.loads(out)
        assert (found["finish"], found["tokens"]) == ("stopped", whole["tokens"][:count])
    else:
        tokenizer = text_input.load_tokenizer(str(model))
        text = Continuation(tokenizer, whole["prompt_ids"]).text(whole["tokens"][:count])
        shown, footer = out.removesuffix("\n").rsplit("\n", 1)
        assert shown == printable(text)
        assert f" + {count} new tokens, stopped; " in footer


def test_generate_warns_on_stderr_past_the_trained_positions_and_keeps_stdout_json(
    model, run, no_weights
):
    no_weights()
    code, out, err = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", 300, "--json")
    assert (code, json.loads(out)["error"]) == (2, "weights were read"), "an error is JSON too"
    assert "kvq: warning:" in err
    assert "256 positions" in err


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


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("1.5 MB", 1_500_000), ("4096", 4096), ("2k", 2000), ("1TiB", 2**40)],
)
def test_sizes_are_read_in_powers_of_1000_and_1024(text, size):
    assert values.byte_size(text) == size


@pytest.mark.parametrize("text", ["2000000TiB", "9" * 19, "9" * 400])
def test_a_size_that_is_too_large_is_told_from_one_that_cannot_be_read(text: str):
    with pytest.raises(ArgumentTypeError, match="is more than the largest size, 1048576TiB"):
        values.byte_size(text)
    with pytest.raises(ArgumentTypeError, match="is not a size; write 24GiB"):
        values.byte_size("2.5")


# --- methods


@pytest.mark.usefixtures("types_unchecked")
def test_methods_lists_every_method_with_its_declared_options(run, run_json):
    found = {method["name"]: method for method in run_json("methods")["methods"]}
    assert list(found) == list(kvq.methods.METHODS)
    by_xla = {name for name, method in found.items() if method["read_by"]["cpu"] == "xla"}
    new = {"kvarn", "oscar_omni", "oscar_spectral", "optr", "block_gtq", "pq"}
    assert by_xla == {"gear", "xquant", "xquant_cl", "zipcache", *new}
    assert found["fp8"]["read_by"] == {"gpu": "xla", "cpu": "native"}
    _, text, _ = run("methods")
    assert "read by xla on a GPU, native on a CPU" in text
    for name, method in kvq.methods.METHODS.items():
        assert f"{name}: {method.summary}" in text
        for option in found[name]["options"]:
            assert option["name"] in text, f"{name}: option {option['name']} is not printed"
        assert found[name]["presets"] == method.presets
        for preset in method.presets:
            assert f"preset={preset}: {method.presets[preset]}" in text
        for spec, bits in found[name]["average_bits"].items():
            kvq.parse(spec)
            assert 1 <= bits <= 16, f"{spec} stores {bits} bits"


# --- demo


def test_demo_measures_every_cache_on_the_shipped_passage(model, run_json, monkeypatch):
    description = " ".join(demo_options.DESCRIPTION.split())
    assert f"{layer_times.CONTEXTS[-1] // 1024}K tokens" in description
    monkeypatch.setattr(layer_times, "CONTEXTS", (64, 128))
    tight = "kivi:bits=2,recent=0,block=8"
    command = f"demo --model {model} --context=96 --new-tokens=8 --cache=dense --cache={tight}"
    found = run_json(command)
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


# --- the command itself


def test_generate_drafts_the_same_text_and_tells_the_steps(model, run, run_json):
    options = "--prompt='the cat is the cat is the cat' --cache=kivi:bits=2 --max-new-tokens=24"
    command = f"generate {model} {options}"
    plain, drafted = run_json(command), run_json(f"{command} --draft 3")
    assert drafted["tokens"] == plain["tokens"]
    assert (plain["steps"], plain["drafts"], drafted["drafts"]) == (24, None, 3)
    assert drafted["steps"] <= 24
    told = f"24 new tokens in {drafted['steps']} steps with drafts of up to 3"
    assert told in run(f"{command} --draft 3")[1]
