"""`kvq prefill` and `kvq generate --from`: one process reads, another continues, and the tokens are
the same as in one process."""

import pathlib

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvq_jax as kvq
from kvq_models import save_llama
from kvq_tools.cli import main
from kvq_tools.cli.planned import named
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error
from tests.methods_table import METHOD_CASES

PROMPT, CACHE = "the key of the cat is 17, that of the dog 5; " * 3, "innerq:sink=4,recent=8"
SAMPLED = "--max-new-tokens 20 --temperature 1.2 --seed 4"


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(PROMPT)
    return path


def request(model: pathlib.Path, prompt: pathlib.Path, out: pathlib.Path) -> list[str]:
    words = ("--cache", CACHE, "--prompt-file", prompt, "--out", out, "--capacity", 128)
    return ["prefill", str(model), *map(str, words)]


@pytest.fixture(scope="module")
def handed(
    model: pathlib.Path, prompt: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    out = tmp_path_factory.mktemp("handed") / "prompt.safetensors"
    assert main.main(request(model, prompt, out)) == 0
    return out


def test_the_file_is_described(
    run_json, model: pathlib.Path, prompt: pathlib.Path, handed: pathlib.Path, tmp_path
):
    result = run_json(*request(model, prompt, tmp_path / "again"))
    facts = {"cache": CACHE, "bytes": handed.stat().st_size, "capacity": 128}
    assert result.items() >= ({"format": "kvq.prefill"} | facts).items()
    assert result["quantized_tokens"] > 0


def test_the_tokens_are_those_of_one_process(
    run, run_json, model: pathlib.Path, prompt: pathlib.Path, handed: pathlib.Path
):
    command = f"generate {model} --prompt-file {prompt} --capacity 128 {SAMPLED} --cache"
    whole = run_json(command, CACHE)
    facts = ("cache", "capacity", "quantized_tokens", "finish", "bits_per_element")
    same = ("tokens", "text", "prompt_ids", *facts)
    for options in ("", f"--cache {CACHE}"):
        found = run_json(f"generate {model} --from {handed} {SAMPLED} {options}")
        assert {name: found[name] for name in same} == {name: whole[name] for name in same}
    other = run_json(command, "kivi:bits=2,recent=8,block=32")
    assert other["tokens"] != whole["tokens"], "every cache gives these tokens"
    config = tiny_config(vocab_size=300, num_hidden_layers=1)
    assert kvq.files.load(handed, config=config).lengths.tolist() == [len(whole["prompt_ids"])]
    assert kvq.files.load_beside(handed)["tokens"].tolist() == whole["prompt_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache", "kivi:bits=2"), ", but --cache is 'kivi:bits=2'"),
        (("--capacity", 256), "--capacity is for one prompt or many prompts: kvq prefill has"),
        (("--mesh", "heads=2"), "--mesh is for one prompt: kvq prefill has already made"),
        (("--max-new-tokens", 500), "has room for 128"),
        (("--prompts", "x.jsonl"), "--from continues one saved prompt: leave out --prompts"),
        (("--chat",), "holds a text, not a chat: leave out --chat"),
        (("--prompt", ""), "the prompt is empty"),
    ],
)
def test_what_does_not_fit_the_file_is_one_line(
    run, model: pathlib.Path, handed: pathlib.Path, options: tuple, message: str
):
    assert_one_line_error(run("generate", model, "--from", handed, *options), message)


def test_another_model_or_a_damaged_file_is_one_line(
    run, model: pathlib.Path, handed: pathlib.Path, tmp_path: pathlib.Path
):
    for layers, message in (
        (1, "another model_fingerprint"),
        (2, "another model: it has num_hidden_layers=1 and not 2"),
    ):
        config = tiny_config(vocab_size=300, num_hidden_layers=layers, max_position_embeddings=256)
        save_llama(random_llama(config, seed=7), tmp_path / message)
        assert_one_line_error(
            run(f"generate '{tmp_path / message}' --from {handed} --max-new-tokens 5"), message
        )
    assert_one_line_error(run("generate", model, "--from", tmp_path / "nowhere"), "is not a file")

    tensors = load_file(handed)
    assert "beside.tokens" in tensors
    with safe_open(handed, framework="numpy") as file:
        header = file.metadata()
    changed = tmp_path / "changed.safetensors"
    bare = {name: array for name, array in tensors.items() if "beside" not in name}
    for content, message in (
        (tensors | {"beside.logits": tensors["beside.logits"] + np.float32(1)}, "the checksum"),
        (tensors | {"beside.tokens": tensors["beside.tokens"][None]}, "does not fit the model"),
        (bare, "no prompt beside its cache"),
    ):
        save_file(content, changed, metadata=header)
        assert_one_line_error(run(f"generate {model} --from {changed} --max-new-tokens 5"), message)


def test_a_cache_of_a_file_is_named_with_its_bits():
    for case in METHOD_CASES:
        text, spec = named(kvq.parse(case.spec))
        assert (kvq.parse(text), spec) == (kvq.parse(case.spec),) * 2, case.id
    assert named(kvq.parse("kivi:bits=2")).text == "kivi:bits=2"
    assert named(kvq.parse("kivi:recent=8")).text == "kivi:bits=2,recent=8"
    assert named(kvq.parse("dense")).text == "dense"
