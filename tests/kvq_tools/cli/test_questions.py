"""Questions about a text that `kvq prefill` saved: their answers are those of a joined prompt, and
the saved text is not read again."""

import pathlib

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_models import generate, load_llama, prefill

TEXT = "the key of the cat is 17, that of the dog 5; " * 3
QUESTIONS = ("the key of the dog is", "the cat is")
QUANTIZED = "kivi:bits=2,recent=8,block=8"
FEW = ("--max-new-tokens", 12)


def saved(run_json, model: pathlib.Path, out: pathlib.Path, *options: object) -> pathlib.Path:
    run_json("prefill", model, "--out", out, "--capacity", 256, *options)
    return out


def asked(run_json, model: pathlib.Path, file: pathlib.Path, question: str) -> dict:
    return run_json("generate", model, "--from", file, "--prompt", question, *FEW)


def joined(run_json, model: pathlib.Path, prompt: str, *options: str) -> dict:
    return run_json("generate", model, "--prompt", prompt, "--capacity", 256, *FEW, *options)


def test_answers_are_those_of_one_prompt(run_json, model: pathlib.Path, tmp_path: pathlib.Path):
    file = saved(run_json, model, tmp_path / "f", "--prompt", TEXT)
    before = file.read_bytes()
    answers = []
    for question in QUESTIONS:
        found = asked(run_json, model, file, question)
        whole = joined(run_json, model, TEXT + question)
        assert (found["prompt_ids"], found["tokens"]) == (whole["prompt_ids"], whole["tokens"])
        assert 0 < found["prompt_tokens"] - found["saved_tokens"] < 30, "the text was read again"
        answers.append(found["tokens"])
    assert answers[0] != answers[1], "the question changes nothing"
    assert file.read_bytes() == before


def test_a_quantized_text_is_read_from_its_cache(
    run_json, model: pathlib.Path, tmp_path: pathlib.Path
):
    file = saved(run_json, model, tmp_path / "f", "--prompt", TEXT, "--cache", QUANTIZED)
    found = asked(run_json, model, file, QUESTIONS[0])
    llama, _ = load_llama(model, dtype="float32")
    ids, kept = np.array([found["prompt_ids"]]), found["saved_tokens"]
    text = kvq.files.load_beside(file)["tokens"][None]
    cache = kvq.init_cache(QUANTIZED, llama.config, 1, 256, "bfloat16")
    _, cache = prefill(llama, cache, text)
    assert found["quantized_tokens"] >= 64
    cache = kvq.rows.trim(cache, jnp.array([kept]))
    answer = generate(llama, cache, ids[:, kept:], max_new_tokens=12).tokens[0].tolist()
    assert found["tokens"] == answer[: len(found["tokens"])]


def test_a_saved_chat_goes_on_as_a_chat(run_json, talker: pathlib.Path, tmp_path: pathlib.Path):
    file = saved(run_json, talker, tmp_path / "f", "--chat", "--prompt", TEXT)
    alone = run_json("generate", talker, "--from", file, *FEW)
    assert alone["tokens"] == joined(run_json, talker, TEXT, "--chat")["tokens"]
    for question in QUESTIONS:
        found = asked(run_json, talker, file, question)
        whole = joined(run_json, talker, TEXT.strip() + "\n\n" + question, "--chat")
        assert (found["prompt_ids"], found["tokens"]) == (whole["prompt_ids"], whole["tokens"])
        assert found["saved_tokens"] > 0.8 * len(alone["prompt_ids"]), "the text was read again"


def test_token_ids_and_files_without_text_go_on_too(
    run_json, model: pathlib.Path, tmp_path: pathlib.Path
):
    file = saved(run_json, model, tmp_path / "f", "--prompt-ids", "1,2,3,4,5")
    found = run_json("generate", model, "--from", file, "--prompt-ids", "6,7", *FEW)
    assert (found["prompt_ids"], found["saved_tokens"]) == ([1, 2, 3, 4, 5, 6, 7], 5)
    text = asked(run_json, model, file, "the cat")
    assert text["prompt_ids"][:5] == [1, 2, 3, 4, 5]
    assert text["saved_tokens"] == 5
