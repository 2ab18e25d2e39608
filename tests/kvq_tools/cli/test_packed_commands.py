"""Commands with the packed weights of a GGUF file: what is read, and what is saved with it."""

import io
import pathlib

import pytest

from kvq_models.llama.packed_weights import unavailable
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import TOKENS, byte_level, write_gguf
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error

TEXT = "12CAT+DOG=" * 30
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a GGUF file of 4-bit matrices, with the text beside it."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("packed")
    config = tiny_config(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=1
    )
    (folder / "text").write_text(TEXT)
    fields = byte_level(chat_template=TEMPLATE)
    return write_gguf(random_llama(config), folder / "m.gguf", kind="Q4_1", tokenizer=fields)


def test_int8_activations_are_compared_with_the_model_that_rounds_nothing(
    packed: pathlib.Path, run_json
):
    options = ("eval", packed, "--text", packed.parent / "text", "--cache", "dense", "--window", 64)
    exact, rounded = (
        run_json(*options, "--limit", 100, "--activations", a) for a in ("float32", "int8")
    )
    assert exact["caches"][0]["kl"] < 1e-9 < 1e-7 < rounded["caches"][0]["kl"]
    assert exact["exact"]["perplexity"] == rounded["exact"]["perplexity"]
    assert (exact["activations"], rounded["activations"]) == ("float32", "int8")


def test_int8_activations_without_packed_weights_are_refused_in_a_line(packed: pathlib.Path, run):
    dense = ("--weights", "dense", "--activations", "int8")
    refused = run("generate", packed, "--prompt", "1", *dense)
    assert_one_line_error(refused, "activations='int8' is for packed integers")


def test_a_chat_goes_on_from_a_text_that_packed_weights_read(
    packed: pathlib.Path, run_json, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "saved"
    run_json("prefill", packed, "--prompt", TEXT[:40], "--out", file, "--capacity", 128)
    monkeypatch.setattr("sys.stdin", io.StringIO("12\n"))
    (turn,) = run_json("chat", packed, "--from", file, "--max-new-tokens", 3)["turns"]
    assert turn["prefilled_tokens"] < 10, "the text was read again"
