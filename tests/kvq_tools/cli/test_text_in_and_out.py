"""Prompts and texts: where they end, where they come from, how tokens are sampled, and in which
dtype."""

import argparse
import importlib
import io
import json
import shutil

import jax
import pytest

import kvq_jax as kvq
from kvq_models.llama.gguf_tokenizer import core_of, tokenizer_of
from kvq_tools.cli import inputs, one_generation, text_input
from kvq_tools.cli.console import UserError, counted
from kvq_tools.cli.continuation import Continuation
from kvq_tools.cli.opening import Opening
from kvq_tools.cli.planned import NamedCache
from tests.kvq_models.checkpoints import CHAT_TEMPLATE, PROMPT, tiny_config
from tests.kvq_models.gguf_files import byte_level

NEW = 12


def test_the_end_token_is_a_token_and_no_text(model, tmp_path, run, run_json):
    """The fourth token of the model's answer becomes an end token that the tokenizer does not count
    as special."""
    arguments = ("--prompt", PROMPT, "--max-new-tokens", NEW, "--dtype", "float32")
    whole = run_json("generate", model, *arguments)
    end = whole["tokens"][3]
    shutil.copytree(model, tmp_path / "ending")
    (tmp_path / "ending" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    ended = run_json("generate", tmp_path / "ending", *arguments)
    position = whole["tokens"].index(end)
    assert ended["tokens"] == whole["tokens"][: position + 1], "the end token is one of the tokens"
    prompt = text_input.load_tokenizer(str(model))(PROMPT).input_ids
    continuation = Continuation(text_input.load_tokenizer(str(model)), prompt)
    assert ended["text"] == continuation.text(whole["tokens"][:position])
    assert ended["text"] != continuation.text(whole["tokens"][: position + 1]), (
        "the end token spells nothing: the test shows nothing"
    )
    assert (whole["finish"], ended["finish"]) == ("max-new-tokens", "ended")
    assert ended["prompt_ids"] == prompt
    assert (ended["model"], ended["prompt_tokens"]) == (str(tmp_path / "ending"), len(prompt))
    _, out, _ = run("generate", tmp_path / "ending", *arguments, "--stream")
    text, footer = out.removesuffix("\n").rsplit("\n", 1)
    assert text == "".join(c for c in ended["text"] if c.isprintable() or c in "\n\t")
    assert (
        f"{counted(position + 1, 'new tokens')}, the last one the end token; greedy; weights"
        " float32, full-precision rows float32" in footer
    )


def test_a_stream_shows_no_end_token(model):
    tokenizer = text_input.load_tokenizer(str(model))
    ids = tokenizer("plain words", add_special_tokens=False).input_ids
    for tokens, shown in ((ids, "plain words"), (None, " ".join(map(str, ids)))):
        stream = Continuation(tokenizer if tokens else None, [1], (ids[0] + 1000, 7))
        assert stream.push([*ids, 7]) == shown
        assert stream.push([*ids, 7], last=True) == ""


def test_a_chat_template_wraps_the_prompt_as_the_users_turn(model):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    tokenizer = text_input.load_tokenizer(str(model))
    tokenizer.chat_template = CHAT_TEMPLATE
    ids = text_input.encode(tokenizer, "hi", chat=True)
    assert tokenizer.decode(ids) == "<user>hi|<assistant>"
    tokenizer.chat_template = "{{ nothing.there.at_all }}"
    with pytest.raises(UserError, match="chat template fails"):
        text_input.encode(tokenizer, "hi", chat=True)


def test_a_template_that_writes_the_first_token_gives_one_of_it():
    """A template writes special tokens itself."""
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    fields = {f"tokenizer.ggml.{name}": value for name, value in byte_level().items()}
    fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    tokenizer = tokenizer_of(fields, core_of(fields))
    bos = tokenizer.bos_token_id
    assert text_input.encode(tokenizer, "THE", chat=True).count(bos) == 1
    assert text_input.encode(tokenizer, "THE").count(bos) == 1
    assert tokenizer(f"{tokenizer.bos_token}THE").input_ids.count(bos) == 2, "the control"


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1), ([2, 1], [1], 0)],
)
def test_a_common_prefix_ends_at_the_first_difference_or_with_the_shorter_list(
    first, second, common
):
    assert text_input.common_prefix(first, second) == common


BOM = b"\xef\xbb\xbf"


def test_a_prompt_can_come_from_stdin_and_a_byte_order_mark_is_no_part_of_it(tmp_path, monkeypatch):
    for content, text in ((BOM + "né\n".encode(), "né\n"), (b"a\r\nb", "a\nb")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        (tmp_path / "prompt.txt").write_bytes(content)
        assert text_input.read_prompt_file("-") == text
        assert text_input.read_prompt_file(str(tmp_path / "prompt.txt")) == text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UserError, match="stdin is not UTF-8 text; convert it to UTF-8"):
        text_input.read_prompt_file("-")


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_one_default_dtype_is_the_fastest_on_the_device(backend, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for command in ("generate", "chat", "eval", "passkey", "niah", "ruler", "report"):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"kvq_tools.cli.options.{command}").configure(parser)
        (action,) = (action for action in parser._actions if action.dest == "dtype")
        options = argparse.Namespace(dtype=action.default)
        assert inputs.model_dtype(options) == dtype, f"kvq {command}"
        for cache, rows in (("dense", dtype), ("kivi:bits=2", "bfloat16")):
            options.cache = NamedCache(cache, kvq.parse(cache))
            assert inputs.rows_dtype(options) == rows, f"kvq {command} {cache}"
    assert inputs.model_dtype(argparse.Namespace(dtype="float16")) == "float16", (
        "what is asked for is taken"
    )


def test_a_model_with_a_sliding_window_is_served_beyond_its_length(tmp_path, run, run_json):
    fields = tiny_config("mistral", sliding_window=32, max_position_embeddings=256).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert run_json("memory", tmp_path, "--cache", "dense")["context"] == 256
    found = run_json("doctor", tmp_path)
    window = found["facts"]["sliding_window"]
    assert (found["context"], window) == (256, "32 tokens in 2 of 2 layers")
    beyond = run("generate", tmp_path, "--prompt-ids", "1,2,3", "--max-new-tokens", 40)
    assert "sliding window" not in beyond[2], beyond
    assert "safetensors" in beyond[2], "it is the weights that are missed"


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({}, "try --chat"),
        ({"saved": Opening("text", chat=False)}, "give kvq prefill --chat"),
        ({"saved": Opening("text", chat=True)}, None),
        ({"chat": True}, None),
        ({"prompt_ids": [5]}, None),
        ({"chat_template": None}, None),
        ({"new_tokens": 2}, None),
        ({"finish": "max-new-tokens"}, None),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_an_answer_that_ends_at_once_advises_the_chat_template(capsys, change, advice):
    given = {"chat": False, "prompt_ids": None, "saved": None, "chat_template": "{{ x }}"}
    given |= {"new_tokens": 1, "finish": "ended"} | change
    options = argparse.Namespace(chat=given["chat"], prompt_ids=given["prompt_ids"])
    saved = given["saved"] and argparse.Namespace(opening=given["saved"])
    tokenizer = argparse.Namespace(chat_template=given["chat_template"])
    one_generation.advise_chat(options, tokenizer, saved, given)
    said = f"kvq: the model ended at once; it was trained on chats: {advice}\n"
    assert capsys.readouterr() == ("", said if advice else "")


def test_one_token_is_no_plural(run, model):
    words = ("--prompt-ids", 1, "--max-new-tokens", 1)
    _, out, err = run("generate", model, *words)
    assert "reading the prompt, 1 token ..." in err
    assert "1 prompt + 1 new token;" in out
