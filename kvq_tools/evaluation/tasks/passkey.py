"""Pass keys: a five-digit number is stated once in a long text and asked for at the end.

The prompt is from Mohtashami & Jaggi 2023 (Landmark Attention), in five lines. As in KIVI's
examples, a space follows the question's last word, so the digits come next. An answer is right if
its first number is the key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvq_tools.evaluation.tasks.filler import (
    DULL,
    FILE_DEPTH,
    depth_of,
    excerpt,
    fitted,
    generator,
    words,
)
from kvq_tools.evaluation.tasks.kinds import PASSKEY_TOKENS as MAX_NEW_TOKENS
from kvq_tools.evaluation.tasks.sample import (
    LENGTH_RULE,
    AnswerRule,
    Fields,
    Scores,
    TaskPrompts,
    TaskSample,
    read_rows,
)

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FACT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = " The pass key is "
FIELDS = Fields({"input": str, "target": str}, filled=("input", "target"))

RULES = {
    "prompt": f"{OPENING}\n[filler]\n{FACT}\n[filler]\n{QUESTION}{ANSWER_PREFIX}",
    "filler": f"words of a text from a random place, or, repeated: {DULL}",
    "depth": "share of the filler's words that stand before the key",
    "length": LENGTH_RULE,
    "score": "1 where the first number in the answer is the key, else 0",
}
FILE_RULES = {
    "prompt": f"[input of the file]{QUESTION}{ANSWER_PREFIX}",
    "depth": FILE_DEPTH,
    "length": RULES["length"],
    "score": RULES["score"],
}


def score(sample: TaskSample, text: str) -> Scores:
    """Return `accuracy`: 1 if the first number in the text is the key, else 0."""
    number = re.search(r"\d+", text)
    return {"accuracy": float(number is not None and number.group() == sample.answers[0])}


def finished(sample: TaskSample, text: str) -> bool:
    """Return True if the first number has ended."""
    return re.search(r"\d\D", text) is not None


TASK = AnswerRule(score, finished)


def generated(
    prompts: TaskPrompts,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int = 0,
    text: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Make `count` samples for each length and depth. The same arguments give the same samples.
    `text`: the filler (default: the dull sentences).

    Raises ValueError if a length has no room for the question, or the text is too short to fill it.
    """
    return [
        _sample(prompts, length, depth, generator(seed, length, depth, i), text, max_new_tokens)
        for length in lengths
        for depth in depths
        for i in range(count)
    ]


def question(key: str, filler: Sequence[str], depth: float) -> str:
    """Return the prompt up to the question."""
    place = round(depth * len(filler))
    return "\n".join(
        (
            OPENING,
            " ".join(filler[:place]),
            FACT.format(key=key),
            " ".join(filler[place:]),
            QUESTION,
        )
    )


def _sample(
    prompts: TaskPrompts,
    length: int,
    depth: float,
    rng: np.random.Generator,
    text: str | None,
    max_new_tokens: int,
) -> TaskSample:
    key, budget = str(rng.integers(10_000, 100_000)), length - max_new_tokens
    dull, maximum = words(DULL), max(budget, 0)
    filler = (
        dull * (maximum // len(dull) + 1) if text is None else excerpt(words(text), maximum, rng)
    )
    ids = fitted(
        lambda n: prompts.ids(question(key, filler[:n], depth), ANSWER_PREFIX), len(filler), budget
    )
    if len(ids) < 0.9 * budget:
        raise ValueError(
            f"the text has {len(filler)} words, too few to fill {length} tokens: give a longer one,"
            " or shorter lengths"
        )
    return TaskSample(
        tuple(ids), (key,), max_new_tokens, {"length": length, "depth": depth}, {"key": key}
    )


def from_file(
    path: str | Path,
    prompts: TaskPrompts,
    *,
    limit: int | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Read samples from a JSON-lines file in KIVI's format: `input` (the text before the question)
    and `target` (the key)."""
    samples = []
    for row in read_rows(path, FIELDS, limit):
        ids = prompts.ids(row["input"] + QUESTION, ANSWER_PREFIX)
        labels = {
            "length": len(ids) + max_new_tokens,
            "depth": depth_of(row["target"], row["input"]),
        }
        samples.append(TaskSample(tuple(ids), (row["target"],), max_new_tokens, labels))
    return samples
