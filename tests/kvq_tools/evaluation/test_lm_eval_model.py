"""lm-eval through a cache: its scores come from decoding, and the cache's bits move them."""

import functools
import json
import random
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

from kvq_models.llama.model import forward
from kvq_tools.evaluation import lm_eval_model

# of lm-eval and datasets, which are others' to mend
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[3]
COARSE = "int2:recent=8"
CHOICES, LINES, TEXTS = "passage_choices", "passage_lines", "passage_texts"


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    text = (ROOT / "kvq_tools" / "cli" / "passage.txt").read_text()
    return [" ".join(part.split()) for part in text.split("\n\n")]


@pytest.fixture
def make(shallow):
    """make(**arguments) -> lm-eval's model of a small checkpoint."""
    return functools.partial(lm_eval_model.KvqLM, shallow)


@pytest.fixture
def offline(monkeypatch):
    """Whoever opens a connection fails."""
    import datasets

    def refuse(self, address):
        raise AssertionError(f"a connection to {address} was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # asks pip and git about the machine, for seconds
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture
def task_folder(tmp_path, paragraphs, offline):
    """Three tasks as local files."""
    text, rng = " ".join(paragraphs).split(), random.Random(0)
    rows = []
    for at in range(0, 6 * 50, 50):
        answer = rng.randrange(3)
        choices = [" ".join(text[other : other + 5]) for other in (at + 400, at + 700)]
        choices.insert(answer, " ".join(text[at + 45 : at + 50]))
        # tokens that share a shape, which saves compiling
        context, whole = (" ".join(text[at : at + words]) for words in (45, 60))
        row = {"context": context, "choices": choices, "label": answer, "text": whole}
        rows.append(row | {"next": choices[answer]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "rows.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
    }
    tasks = {
        CHOICES: {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        },
        LINES: {
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{next}}",
            "generation_kwargs": {"until": [","], "max_gen_toks": 16, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        TEXTS: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, task in tasks.items():
        # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | task))
    return tmp_path


def evaluated(lm, folder, *tasks):
    """Return (results, {task: the model's answers in the order of the rows})."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(tasks),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    answers = {}
    for task in tasks:
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        answers[task] = [
            (sample["arguments"], [r[0] for r in sample["resps"]]) for sample in samples
        ]
    return found["results"], answers


def instances(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(arguments)]


def exact(lm, context, continuation):
    """Return (log-probability, greedy) of a continuation by a padded plain forward pass."""
    row = np.zeros((1, 256), np.int32)
    row[0, : len(context + continuation)] = context + continuation
    logits = np.asarray(jax.jit(forward)(lm.llama, jnp.asarray(row))[0], np.float64)
    logits = logits[len(context) - 1 : len(context + continuation) - 1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    greedy = bool((logits.argmax(-1) == continuation).all())
    return logprobs[range(len(continuation)), continuation].sum(), greedy


def worst(found, expected):
    return max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True))


def test_scores_are_those_of_decoding_and_change_with_the_bits(task_folder):
    dense, coarse = (lm_eval_model.KvqLM(cache=cache, batch_size=6) for cache in ("dense", COARSE))
    results, answers = evaluated(dense, task_folder, CHOICES, LINES, TEXTS)
    moved, others = evaluated(coarse, task_folder, CHOICES, LINES, TEXTS)

    asked = [pair for arguments, _ in answers[CHOICES] for pair in arguments]
    scores, coarse_scores = (
        [score for _, scores in one[CHOICES] for score in scores] for one in (answers, others)
    )
    expected = [exact(dense, *dense._encode_pair(*pair)) for pair in asked]
    assert len(asked) == 18
    assert worst(scores, expected) < 1e-3
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]

    assert worst(coarse_scores, expected) > 0.1
    perplexity, coarser = (one[TEXTS]["word_perplexity,none"] for one in (results, moved))
    assert coarser > 1.01 * perplexity, f"2 bits: {coarser}, exact: {perplexity}"
    assert [r for _, r in others[LINES]] != [r for _, r in answers[LINES]]
    assert not any("," in text for _, texts in answers[LINES] + others[LINES] for text in texts)


def test_results_come_back_in_the_order_of_the_requests_and_do_not_depend_on_the_batch(
    make, paragraphs
):
    lm = make(batch_size=2)
    words = " ".join(paragraphs).split()
    pairs = [
        (" ".join(words[at : at + length]), " " + words[at + length])
        for at, length in ((0, 25), (40, 3), (90, 55), (200, 12))
    ]
    together = lm.loglikelihood(instances(*pairs), disable_tqdm=True)
    alone = [lm.loglikelihood(instances(pair), disable_tqdm=True)[0] for pair in pairs]
    assert worst(together, alone) < 1e-4
    assert worst(together, alone[1:] + alone[:1]) > 0.1


def test_long_contexts_lose_tokens_on_the_left(make, paragraphs):
    lm = make(max_length=40)
    ids = lm.tok_encode(" ".join(paragraphs))[:120]
    found = lm._loglikelihood_tokens([(None, ids[:110], ids[110:])], disable_tqdm=True)
    assert worst(found, [exact(lm, ids[79:110], ids[110:])]) < 1e-3  # 40 inputs, and the last token
    assert worst(found, [exact(lm, ids[80:110], ids[110:])]) > 1e-3


def test_a_cache_with_prompt_statistics_gets_its_context_as_a_prompt(make):
    assert make(cache="innerq:bits=2,recent=32").get_model_info()["context"] == "prefill"
    assert make(cache="innerq:bits=2,recent=32,normalize=false").context == "decode"


def test_rolling_windows_predict_each_token_once(make, paragraphs):
    lm = make(max_length=40)
    text = " ".join(paragraphs)[:400]
    ids = [lm.prefix_token_id, *lm.tok_encode(text)]
    assert len(ids) > 81
    found = lm.loglikelihood_rolling(instances((text,)), disable_tqdm=True)
    # of windows of 40 inputs; the last one scores what is left
    ends = [*range(41, len(ids), 40), len(ids)]
    starts = [1, *ends[:-1]]
    expected = sum(
        exact(lm, ids[max(0, end - 41) : start], ids[start:end])[0]
        for start, end in zip(starts, ends, strict=True)
    )
    assert found == pytest.approx([expected], abs=1e-3)


def test_generation_is_that_of_generate_and_ends_at_the_first_stop(make, paragraphs):
    from kvq_jax.cache.cache import init_cache
    from kvq_models.inference.generation import generate

    lm = make()

    def text(*stops):
        asked = instances((paragraphs[0], {"until": list(stops), "max_gen_toks": 12}))
        return lm.generate_until(asked, disable_tqdm=True)[0]

    ids = lm.tok_encode(paragraphs[0])
    tokens = np.array([ids + [0] * (52 - len(ids))])
    cache = init_cache(lm.spec, lm.llama.config, 1, 64, "float32")
    out = generate(lm.llama, cache, tokens, np.array([len(ids)]), max_new_tokens=12, eos_ids=(0,))
    whole = lm.tokenizer.decode(out.tokens[0, : int(out.lengths[0])], skip_special_tokens=True)
    early, late = whole.split()[1], whole.split()[-1]
    assert early not in late
    assert text() == whole
    assert text(late, early) == whole.split(early)[0]


@pytest.mark.usefixtures("types_unchecked")
def test_mistakes_are_named():
    for arguments, line in (
        ({"cache": "int1"}, "int1"),
        ({"cache": "kvquant"}, "needs a calibration"),
        ({"context": "chunked"}, "must be one of decode, prefill"),
        ({"batch_size": "auto"}, "integer of at least 1"),
        ({"max_length": 4096}, "2048 positions"),
        ({"max_length": 0}, "max_length=0 must be between 1"),
    ):
        with pytest.raises(ValueError, match=line):
            lm_eval_model.KvqLM(**arguments)
    lm = lm_eval_model.KvqLM(max_length=40)
    for options, line in (
        ({"num_beams": 4}, "num_beams are not supported"),
        ({"max_gen_toks": 40}, "leave room"),
    ):
        with pytest.raises(ValueError, match=line):
            lm.generate_until(instances(("It", options)), disable_tqdm=True)
    with pytest.raises(ValueError, match="at most max_length=40"):
        lm._loglikelihood_tokens([(None, [1], [2] * 41)])


def test_numbers_that_are_not_finite_are_no_scores(make, paragraphs):
    """The likeliest of several choices would be the first one that is nan."""
    lm = make()
    kernel = lm.llama.layers[0].v_proj.kernel
    kernel[...] = kernel[...] * jnp.inf
    asked = (paragraphs[0], " word"), (paragraphs[0], {"until": ["."], "max_gen_toks": 8})
    for answer, pair in zip((lm.loglikelihood, lm.generate_until), asked, strict=True):
        with pytest.raises(FloatingPointError, match=r"not finite \(nan or inf\) with dense"):
            answer(instances(pair), disable_tqdm=True)
