"""Scores of the task evaluations on hand-made answers, right and wrong ones."""

from __future__ import annotations

import json

import pytest

from kvq_tools.evaluation.tasks import gsm8k, longbench, niah, passkey
from kvq_tools.evaluation.tasks.longbench_metrics import METRICS, needed
from kvq_tools.evaluation.tasks.rouge import rouge_l
from kvq_tools.evaluation.tasks.sample import Prompts, Sample
from tests.kvq_tools.evaluation.test_tasks import Words


def scored(task, text, *answers, **more):
    return next(iter(task.score(Sample((1,), answers, 8, **more), text).values()))


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
    assert scored(passkey.TASK, text, "12345") == score
    assert passkey.finished(Sample((1,), ("12345",), 8), text) is finished


@pytest.mark.parametrize(("text", "score"), [("a1, B2", 1), ("B2", 0.5), ("a 1 b 2", 0), ("", 0)])
def test_the_share_of_needles_found(text, score):
    sample = Sample((1,), ("A1", "b2"), 8)
    assert niah.score(sample, text) == {"accuracy": score}
    assert niah.finished(sample, text) is (score == 1)


@pytest.mark.parametrize(
    ("text", "flexible", "strict"),
    [
        ("So 3 + 4 = 7. The answer is 7.", 1, 1),
        ("The answer is 7. Then 8 more.", 0, 1),
        ("It is $7.", 1, 0),
        ("7,000", 0, 0),
        ("The answer is 7,", 1, 1),
        ("The answer is -7.", 0, 0),
        ("The answer is 7.\n\nQ: 1 and 1? The answer is 2.", 1, 1),  # what follows a stop does not count
        ("seven", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_takes_the_last_number_or_what_follows_the_phrase(text, flexible, strict):
    assert gsm8k.score(Sample((1,), ("7",), 8), text) == {"flexible": flexible, "strict": strict}


def test_gsm8k_compares_numbers_without_signs_of_thousands_and_money():
    assert [gsm8k.flexible(text) for text in ("$70,000.", "x 5.50", "a -3", "#### 12")] == ["70000", "5.50", "-3", "12"]
    assert gsm8k.finished(Sample((1,), ("7",), 8), "7\nQ:") is True
    assert gsm8k.finished(Sample((1,), ("7",), 8), "7\nA:") is False


CASES = {
    # metric, prediction, answer, classes, score
    "same words": ("qa_f1", "The cat, sat!", "a cat sat", (), 1),
    "half of the words": ("qa_f1", "cat dog", "cat bird", (), 0.5),
    "a repeated word counts once": ("qa_f1", "cat cat", "cat", (), 2 / 3),
    "no common word": ("qa_f1", "dog", "cat", (), 0),
    "an empty answer": ("qa_f1", "", "cat", (), 0),
    "the class": ("classification", "It is Food", "Food", ("Food", "Animal"), 1),
    "two classes": ("classification", "Food or Animal", "Food", ("Food", "Animal"), 0.5),
    "a wrong class": ("classification", "Animal", "Food", ("Food", "Animal"), 0),
    "a part of the right name": ("classification", "Date of birth", "Date of birth", ("Date", "Date of birth"), 1),
    "the name after a deleted one stays": ("classification", "abc", "abc", ("a", "b", "abc"), 0.5),
    "the paragraph": ("retrieval", "Paragraph 12", "Paragraph 12", (), 1),
    "two paragraphs": ("retrieval", "Paragraph 12 or 3", "Paragraph 12", (), 0.5),
    "a wrong paragraph": ("retrieval", "Paragraph 1", "Paragraph 12", (), 0),
    "no paragraph": ("retrieval", "none", "Paragraph 12", (), 0),
    "the Chinese paragraph": ("retrieval_zh", "段落12", "段落12", (), 1),
    "a wrong Chinese paragraph": ("retrieval_zh", "段落2", "段落12", (), 0),
    "the count": ("count", "There are 5", "5", (), 1),
    "counts": ("count", "5 of 20", "5", (), 0.5),
    "a wrong count": ("count", "15", "5", (), 0),
    "the line": ("code_sim", "\n\n# why\n```\nx = 1\ny = 2", "x = 1", (), 1),
    "a similar line": ("code_sim", "x = 12", "x = 1", (), 0.91),
    "another line": ("code_sim", "return", "x = 1", (), 0),
    "only comments": ("code_sim", "# x = 1", "x = 1", (), 0),
    "the summary": ("rouge", "A cat sat.", "A cat sat.", (), 1),
    "an empty summary": ("rouge", " ...", "A cat sat.", (), 0),
    "another summary": ("rouge", "Dogs ran.", "A cat sat.", (), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_longbench_metrics(case):
    metric, prediction, answer, classes, score = CASES[case]
    assert METRICS[metric](prediction, answer, classes) == pytest.approx(score, abs=1e-7)


def test_rouge_is_that_of_the_benchmarks_package():
    """Values of rouge 1.0.1, scores["rouge-l"]["f"] of get_scores(..., avg=True)."""
    golden = [
        ("The cat sat on the mat. It slept.", "The cat slept on the mat.", 0.8571428522448981),
        ("a b c. d e", "c b a. e d. ", 0.36363635867768596),
        ("one two two three", "two one two three four", 0.8571428522448981),
        ("Hello. World", "Hello there. world", 0.39999999520000007),
        ("x a y b", "a x b y", 0.4999999950000001),
    ]
    for prediction, reference, value in golden:
        assert rouge_l(prediction, reference) == pytest.approx(value, abs=1e-12), (prediction, reference)


def test_longbench_takes_the_best_answer_and_the_first_line_where_the_benchmark_does(tmp_path):
    def score(name, text, *answers):
        return scored(longbench.TASK, text, *answers, labels={"dataset": name}, facts={"classes": ("Yes", "No")})

    assert score("qasper", "cat", "dog", "cat") == 1
    assert score("trec", "\nYes\nNo", "Yes") == 1
    assert score("triviaqa", "cat\ndog", "cat") == 1
    assert score("qasper", "cat\ndog", "cat") == pytest.approx(2 / 3), "a dataset whose whole answer counts"
    for name, expected in (("samsum", True), ("qasper", False)):
        sample = Sample((1,), ("a",), 8, {"dataset": name})
        assert longbench.finished(sample, "\na line\n") is expected
        assert longbench.finished(sample, "\na line") is False


def test_all_datasets_have_a_metric_and_a_prompt_with_their_context():
    assert len(longbench.datasets()) == 21
    for name, dataset in longbench.datasets().items():
        assert dataset.metric in METRICS, name
        assert "{context}" in dataset.prompt, name
        assert dataset.prompt.format(input="i", context="c"), name


def test_a_dataset_that_needs_a_missing_package_says_so(tmp_path, monkeypatch):
    from kvq_tools.evaluation.tasks import longbench_metrics

    monkeypatch.setattr(longbench_metrics.importlib.util, "find_spec", lambda _: None)
    assert [name for name in METRICS if needed(name)] == ["qa_f1_zh", "rouge_zh"]
    (tmp_path / "vcsum.jsonl").write_text(json.dumps({"input": "", "context": "c", "answers": ["a"]}))
    with pytest.raises(ValueError, match="pip install jieba"):
        longbench.from_file(tmp_path / "vcsum.jsonl", Prompts(Words()), 2048)
