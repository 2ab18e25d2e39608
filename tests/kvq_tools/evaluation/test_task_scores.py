"""Scores of the task evaluations on hand-made answers, right and wrong ones."""

import pytest

from kvq_tools.evaluation.tasks import niah, passkey
from kvq_tools.evaluation.tasks.sample import TaskSample


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
