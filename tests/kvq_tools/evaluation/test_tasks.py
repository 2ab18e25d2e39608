"""Tasks: prompts have the documented content and default lengths, generation runs through the
cache, and answers are scored as the rules say."""

import argparse
import functools
import itertools
import json
import re

import pytest

import kvq_jax as kvq
from kvq_models import EMBEDDED, load_llama, save_llama
from kvq_tools.cli import task_runs
from kvq_tools.evaluation.tasks import niah, passkey
from kvq_tools.evaluation.tasks.runner import run
from kvq_tools.evaluation.tasks.sample import AnswerRule, TaskPrompts, TaskSample
from laboratory.stress import Outliers, Stress, stressed
from tests.kvq_models.checkpoints import tiny_config
from tests.kvq_tools.evaluation.task_samples import (
    DEPTHS,
    TEXT,
    embedded_prompts,
    needles,
    passkeys,
    prompt_text,
)


@pytest.mark.parametrize(
    "make",
    [passkeys, functools.partial(needles, "multikey_1"), functools.partial(needles, "multikey_3")],
)
def test_the_seed_decides_about_samples(make):
    assert make() == make()
    assert make() != make(seed=1)
    assert len({sample.answers for sample in make()}) > 1


@pytest.mark.parametrize("text", [None, TEXT])
def test_a_pass_key_is_stated_once_at_its_depth_in_a_prompt_of_its_length(text):
    for sample in passkeys(text=text):
        words, (key,) = prompt_text(sample), sample.answers
        fact = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        assert words.count(fact) == 1
        assert words.startswith(passkey.OPENING)
        assert words.endswith("\nWhat is the pass key? The pass key is "), "the digits come next"
        before, after = (
            len(part.split()) for part in words.removeprefix(passkey.OPENING).split(fact)
        )
        after -= len(f"{passkey.QUESTION}{passkey.ANSWER_PREFIX}".split())
        assert before / (before + after) == pytest.approx(
            sample.labels["depth"], abs=1 / (before + after)
        )
        need = len(sample.prompt) + sample.max_new_tokens
        assert sample.labels["length"] - 8 <= need <= sample.labels["length"], f"{need} tokens"


@pytest.mark.parametrize("kind", niah.KINDS)
def test_needles_stand_where_they_are_said_to_be_and_are_asked_for_as_ruler_does(kind):
    what = niah.KINDS[kind]
    length = 2000 if what.keys == "uuids" else 500
    samples = needles(kind, lengths=(length,))
    assert len(samples) == (len(DEPTHS) * 2 if what.single else 2), (
        "several needles have no single depth"
    )
    for sample in samples:
        words = prompt_text(sample)
        assert len(sample.facts["needles"]) == what.needles * what.values_each
        assert all(words.count(needle) == 1 for needle in sample.facts["needles"])
        found = dict.fromkeys(
            re.findall(rf"One of the special magic {what.values} for (\S+) is: (\S+)\.", words)
        )
        assert (len(found) > len(sample.facts["needles"])) is (what.haystack == "needles")
        asked = re.search(
            r"What (?:is|are all) the special magic \w+ for (.*) mentioned in the provided text\?",
            words,
        )
        keys = re.split(r", and |, ", asked[1])
        assert sorted(value for key, value in found if key in keys) == sorted(sample.answers)
        assert len(keys) == what.asked
        assert len(sample.prompt) + 32 <= length
        depth = sample.labels["depth"]
        if depth is not None:
            context = words.split("afterwards.\n")[1].split("\nWhat is")[0]
            place = context.index(sample.facts["needles"][0]) / (
                len(context) - len(sample.facts["needles"][0])
            )
            assert place == pytest.approx(depth, abs=0.15), f"{place} for {depth}"


def test_prompts_of_needles_are_those_of_rulers_own_file():
    words = prompt_text(needles("multikey_3")[0])
    start = (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will"
        " quiz you about the uuid afterwards.\n"
    )
    key = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
    line = rf"One of the special magic uuids for {key} is: {key}\.\n"
    question = rf"What is the special magic uuid for ({key}) mentioned in the provided text\?"
    end = r" The special magic uuid for \1 mentioned in the provided text is"
    assert re.fullmatch(
        f"{re.escape(start)}({line})+{question}{end}".replace(r"\1", r"\2"), words
    ), words


def default_lengths(make, positions):
    """Return the lengths of the samples that a command makes for a model of so many positions
    without --lengths."""
    options = argparse.Namespace(lengths=None, limit=1, seed=0, max_new_tokens=None)
    samples = task_runs.generated(options, tiny_config(max_position_embeddings=positions), make)
    return [
        length for length, _ in itertools.groupby(sample.labels["length"] for sample in samples)
    ]


def test_default_lengths_are_those_within_the_positions_that_the_question_fits(capsys):
    make = functools.partial(passkey.generated, embedded_prompts(), depths=(0.0,))
    assert default_lengths(make, 4096) == [1024, 2048, 4096]
    assert capsys.readouterr().err == ""
    assert default_lengths(make, 256) == [128, 256], "the question alone takes more than 64 tokens"
    told = capsys.readouterr().err
    assert "no samples of 64 tokens: the question needs about 1" in told, told


# --- answers


@pytest.mark.parametrize(
    ("text", "score", "finished"),
    [
        ("12345.", 1, True),
        (" is 12345\n67890", 1, True),
        ("12345", 1, False),  # it may go on
        ("123456", 0, False),
        ("1234 5", 0, True),
        ("no 99999, but 12345", 0, True),
        ("none", 0, False),
        ("", 0, False),
    ],
)
def test_the_first_number_is_the_pass_key(text, score, finished):
    sample = TaskSample((1,), ("12345",), 8)
    assert passkey.score(sample, text) == {"accuracy": score}
    assert passkey.finished(sample, text) is finished


@pytest.mark.parametrize(("text", "score"), [("a1, B2", 1), ("B2", 0.5), ("a 1 b 2", 0), ("", 0)])
def test_the_share_of_needles_found(text, score):
    sample = TaskSample((1,), ("A1", "b2"), 8)
    assert niah.score(sample, text) == {"accuracy": score}
    assert niah.finished(sample, text) is (score == 1)


def lengths_task(asked):
    """A task whose score is the number of characters, finished after `asked` of them."""
    return AnswerRule(
        lambda _, text: {"characters": min(len(text), asked) / asked},
        lambda _, text: len(text) >= asked,
    )


def test_scores_do_not_depend_on_the_batch_and_every_sample_is_answered_once(tiny):
    llama, tokenizer = load_llama(tiny, dtype="float32")
    prompts = TaskPrompts(tokenizer)
    samples = [TaskSample(tuple(prompts.ids("one two three " * n)), (), 12) for n in (1, 2, 3)]
    found = {}
    for batch in (1, 2):
        answers = list(
            run(llama, kvq.parse("dense"), lengths_task(1000), samples, prompts, batch=batch)
        )
        assert sorted(answer.index for answer in answers) == [0, 1, 2], f"batches of {batch}"
        found[batch] = {answer.index: (answer.text, answer.tokens) for answer in answers}
    assert found[1] == found[2]
    assert len({text for text, _ in found[1].values()}) > 1, "the prompts make no difference"


def test_a_cache_that_forgets_fails_and_the_exact_one_remembers(run_json, tmp_path):
    """On trained weights, with keys that int4 cannot hold: the answers come from the cache."""
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    save_llama(stressed(llama, Stress(key_outliers=Outliers(4, 64.0))), tmp_path, tokenizer)
    arguments = ("--lengths=256", "--depths=0.2,0.6", "--limit=2", "--cache=dense", "--cache=int4")
    found = run_json("passkey", tmp_path, *arguments, "--answers", tmp_path / "answers")
    exact, forgetful = found["caches"]
    assert exact["scores"] == {"accuracy": 1}
    assert forgetful["scores"] == {"accuracy": 0}
    assert (exact["won"], exact["lost"], forgetful["won"], forgetful["lost"]) == (0, 0, 0, 4)
    assert exact["intervals"]["accuracy"] == pytest.approx([0.5101, 1], abs=1e-4)
    assert [
        (part["depth"], part["samples"], part["accuracy"]) for part in exact["by"]["depth"]
    ] == [(0.2, 2, 1), (0.6, 2, 1)]
    assert exact["by"]["length"] == [{"length": 256, "samples": 4, "accuracy": 1}]
    assert exact["cache_bytes"] > forgetful["cache_bytes"]
    assert (found["samples"], found["max_new_tokens"]) == (4, 16)
    assert "What is the pass key? The pass key is " in found["rules"]["prompt"]
    written = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    shown = [
        {"cache": one["name"]} | answer for one in found["caches"] for answer in one["answers"]
    ]
    assert sorted(written, key=str) == sorted(shown, key=str)


@pytest.mark.parametrize(
    ("loop", "caches", "samples"), [("dense", 1, 2), ("int4", 1, 4), ("int8", 2, 4)]
)
def test_ctrl_c_shows_the_scores_that_compare(run, press_in, loop, caches, samples):
    press_in(loop, 1)
    named = ["--cache=dense", "--cache=int4", "--cache=int8"]
    sizes = ["--lengths=256", "--depths=0.2,0.6", "--limit=2", "--batch=2"]
    code, out, err = run("passkey", EMBEDDED, *named, *sizes, "--json")
    shown = json.loads(out)
    assert code == 130
    assert err.endswith(f"the scores are of {caches} of 3 caches and {samples} of 4 samples\n")
    assert [len(cache["answers"]) for cache in shown["caches"]] == [samples] * caches
    assert shown["samples"] == samples
