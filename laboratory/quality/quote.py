"""Verbatim quotes: a passage that stands far back in a long text is to be repeated word by word.

The answer begins with the passage's first words, which are given. Errors are counted in characters:
a cache that blurs what it read changes names, numbers and endings first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvq_tools.evaluation.tasks.filler import excerpt, fitted, generator, words
from kvq_tools.evaluation.tasks.sample import AnswerRule, Scores, TaskPrompts, TaskSample

OPENING = "Read the following text. I will ask you to repeat a passage of it word by word."
QUESTION = "Repeat the passage that begins with {beginning!r}."
ANSWER_PREFIX = " The passage is: {beginning}"
GIVEN, QUOTED = 8, 24  # words of the passage: in the question, and to be repeated
MAX_NEW_TOKENS = 64

RULES = {
    "prompt": f"{OPENING}\n[text]\n{QUESTION}{ANSWER_PREFIX}",
    "depth": "share of the text's words that stand before the passage",
    "length": (
        "tokens of the prompt and of max_new_tokens; the prompt is at most that long, and nothing"
        " is cut"
    ),
    "score": (
        f"1 less the character errors (Levenshtein) for each character of the {QUOTED} words that"
        " follow, at least 0; white space counts as one space"
    ),
}


def errors(text: str, right: str) -> int:
    """Return the fewest insertions, deletions and replacements of characters that turn one text
    into the other (Levenshtein)."""
    costs = list(range(len(right) + 1))
    for i, character in enumerate(text, 1):
        diagonal, costs[0] = costs[0], i
        for j, other in enumerate(right, 1):
            replaced = diagonal + (character != other)
            diagonal = costs[j]
            costs[j] = min(replaced, costs[j] + 1, costs[j - 1] + 1)
    return costs[-1]


def score(sample: TaskSample, text: str) -> Scores:
    """Return `accuracy`, 1 - errors / characters of the passage and at least 0, and `verbatim`, 1
    for no error."""
    right = sample.answers[0]
    wrong = errors(" ".join(text.split())[: len(right)], right)
    return {"accuracy": max(0.0, 1 - wrong / len(right)), "verbatim": float(not wrong)}


def finished(sample: TaskSample, text: str) -> bool:
    """Return True if the text is as long as the passage."""
    return len(" ".join(text.split())) >= len(sample.answers[0])


TASK = AnswerRule(score, finished)


def generated(
    prompts: TaskPrompts,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    text: str,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Make `count` samples for each length and depth, from random places of `text`. The same
    arguments give the same samples.

    Raises ValueError if a length has no room for the question, or the text is too short to fill it.
    """
    return [
        _sample(prompts, length, depth, generator(seed, length, depth, i), text, max_new_tokens)
        for length in lengths
        for depth in depths
        for i in range(count)
    ]


def _sample(
    prompts: TaskPrompts,
    length: int,
    depth: float,
    rng: np.random.Generator,
    text: str,
    max_new_tokens: int,
) -> TaskSample:
    budget = length - max_new_tokens
    place = excerpt(words(text), max(budget, 0), rng)
    whole = GIVEN + QUOTED

    def parts(count: int) -> tuple[str, str, str]:
        """Return the text, and the passage's given and quoted words, with `count` words around."""
        at = round(depth * count)
        passage = place[at : at + whole]
        return (
            " ".join(place[: count + whole]),
            " ".join(passage[:GIVEN]),
            " ".join(passage[GIVEN:]),
        )

    def build(count: int) -> list[int]:
        context, beginning, _ = parts(count)
        question = "\n".join((OPENING, context, QUESTION.format(beginning=beginning)))
        return prompts.ids(question, ANSWER_PREFIX.format(beginning=beginning))

    sizes: dict[int, int] = {}

    def sized(count: int) -> list[int]:
        ids = build(count)
        sizes[len(ids)] = count
        return ids

    ids = fitted(sized, max(len(place) - whole, 0), budget)
    if len(ids) < 0.9 * budget:
        raise ValueError(
            f"the text has {len(words(text))} words, too few to fill {length} tokens: give a longer"
            " one, or shorter lengths"
        )
    quoted = parts(sizes[len(ids)])[2]
    labels = {"length": length, "depth": depth}
    return TaskSample(tuple(ids), (quoted,), max_new_tokens, labels, {"quote": quoted})
