"""Needles in a haystack: facts hidden in a long text, some of which are asked for at the end. The
eight tasks of RULER (Hsieh et al. 2024).

Prompt, needles, haystacks and score are RULER's. Differences: keys come from two short word lists,
because RULER's list is not part of kvq; the user's text replaces its essays; and the needle that is
asked for has a given depth instead of a random one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvq_tools.evaluation.tasks import filler
from kvq_tools.evaluation.tasks.kinds import NEEDLE_KINDS as KINDS
from kvq_tools.evaluation.tasks.kinds import NEEDLE_TOKENS as MAX_NEW_TOKENS
from kvq_tools.evaluation.tasks.kinds import NeedleKind
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
    "{Some} special magic {things} {are} hidden within the following text. Make sure to memorize"
    " it. I will quiz you about the {things} afterwards."
)
NEEDLE = "One of the special magic {things} for {key} is: {value}."
QUESTION = "What {are_all} the special magic {things} for {keys} mentioned in the provided text?"
FIELDS = Fields(
    {"input": str, "outputs": list}, {"answer_prefix": str}, filled=("input", "outputs")
)
ANSWER_PREFIX = " The special magic {things} for {keys} mentioned in the provided text {are}"
MIN_NEEDLE_TOKENS = 8


SINGULAR = {"Some": "A", "are": "is", "are_all": "is"}
PLURAL = {"Some": "Some", "are": "are", "are_all": "are all"}


def _form(number: dict[str, str], things: str, keys: str, context: str) -> tuple[str, str]:
    """Return (the prompt up to the question, the beginning of the answer)."""
    words = number | {"things": things, "keys": keys}
    return "\n".join(
        (OPENING.format(**words), context, QUESTION.format(**words))
    ), ANSWER_PREFIX.format(**words)


RULES = {
    "prompt": "".join(_form(SINGULAR, "number", "{key}", "{haystack}")),
    "prompt for several values": "".join(
        _form(PLURAL, "numbers", "{key}, and {key}", "{haystack}")
    ),
    "needle": NEEDLE.replace("{things}", "numbers"),
    "haystack": (
        f"noise: lines of {filler.DULL!r}; text: sentences from a random place; needles: others,"
        " one a line"
    ),
    "depth": (
        "share of the haystack before the needle that is asked for; all others stand anywhere, and"
        " all if several are asked for"
    ),
    "length": LENGTH_RULE,
    "score": "share of the values that the answer contains, in upper or lower case",
}
FILE_RULES = {
    "prompt": "of the file",
    "depth": filler.FILE_DEPTH,
    "length": RULES["length"],
    "score": RULES["score"],
}


def score(sample: TaskSample, text: str) -> Scores:
    """Return `accuracy`, 0 to 1: the share of the wanted values that occur anywhere in the text,
    ignoring case (RULER's string_match_all)."""
    text = text.lower()
    return {
        "accuracy": sum(value.lower() in text for value in sample.answers) / len(sample.answers)
    }


def finished(sample: TaskSample, text: str) -> bool:
    """Return True if the text has every value."""
    return score(sample, text)["accuracy"] == 1


TASK = AnswerRule(score, finished)


def generated(
    prompts: TaskPrompts,
    kind: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int = 0,
    text: str | None = None,
    suffix: str = "",
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Make `count` samples for each length and depth (for each length, if several values are asked
    for). The same arguments give the same samples. kind: a name in KINDS. text: the haystack, for
    kinds that need one. suffix: appended to the prompt's last word.

    Raises ValueError if the kind needs a text and there is none, a length has no room for the
    needles, or the text is too short to fill it.
    """
    if KINDS[kind].haystack == "text" and text is None:
        raise ValueError(f"{kind} hides needles in a text: give one (--text FILE)")
    pieces = filler.sentences(text) if text is not None else []
    return [
        _sample(
            prompts,
            KINDS[kind],
            length,
            depth,
            filler.generator(seed, length, depth or 0, i),
            pieces,
            suffix,
            max_new_tokens,
        )
        for length in lengths
        for depth in (depths if KINDS[kind].single else (None,))
        for i in range(count)
    ]


@dataclasses.dataclass(frozen=True)
class Needles:
    """The needles of one sample and the depths of all. The first `asked` needles are asked for."""

    kind: NeedleKind
    pairs: tuple[tuple[str, str], ...]  # (key, value)
    depths: tuple[float, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(value for _, value in self.pairs[: self.kind.asked * self.kind.values_each])

    def question(self, haystack: Sequence[str]) -> tuple[str, str]:
        """Return (the prompt up to the question, the beginning of the answer)."""
        lines = list(haystack)
        for depth, needle in sorted(zip(self.depths, self.texts(), strict=True), reverse=True):
            lines.insert(round(depth * len(haystack)), needle)
        keys = list(dict.fromkeys(key for key, _ in self.pairs))[: self.kind.asked]
        context = (" " if self.kind.haystack == "text" else "\n").join(lines)
        if self.kind.single:
            return _form(SINGULAR, self.kind.values.removesuffix("s"), keys[0], context)
        return _form(
            PLURAL,
            self.kind.values,
            keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}",
            context,
        )

    def texts(self) -> list[str]:
        return [_needle(self.kind, key, value) for key, value in self.pairs]


def draw_needles(kind: NeedleKind, depth: float | None, rng: np.random.Generator) -> Needles:
    """Draw needles with different keys, the first at `depth` and the others anywhere. If `depth` is
    None, all are anywhere."""
    keys: list[str] = []
    while len(keys) < kind.needles:
        key = _drawn(kind.keys, rng)
        if key not in keys:
            keys.append(key)
    pairs = tuple((key, _drawn(kind.values, rng)) for key in keys for _ in range(kind.values_each))
    depths = rng.random(len(pairs)).tolist()
    return Needles(kind, pairs, (depths[0] if depth is None else depth, *depths[1:]))


def _sample(
    prompts: TaskPrompts,
    kind: NeedleKind,
    length: int,
    depth: float | None,
    rng: np.random.Generator,
    pieces: Sequence[str],
    suffix: str,
    max_new_tokens: int,
) -> TaskSample:
    budget = length - max_new_tokens
    needles = draw_needles(kind, depth, rng)
    haystack = _haystack(kind, pieces, max(budget, 0), rng, {key for key, _ in needles.pairs})

    def build(count: int) -> list[int]:
        question, prefix = needles.question(haystack[:count])
        return prompts.ids(question, prefix + suffix)

    ids = filler.fitted(build, len(haystack), budget)
    if len(ids) < 0.8 * budget and kind.haystack == "text":
        raise ValueError(
            f"the text has {len(pieces)} sentences, too few to fill {length} tokens: give a longer"
            " one, or shorter lengths"
        )
    facts = {"needles": needles.texts()}
    return TaskSample(
        tuple(ids), needles.answers, max_new_tokens, {"length": length, "depth": depth}, facts
    )


def _haystack(
    kind: NeedleKind, pieces: Sequence[str], budget: int, rng: np.random.Generator, taken: set[str]
) -> Sequence[str]:
    """Return enough units to fill `budget` tokens. Distracting needles have keys that are not
    `taken`."""
    match kind.haystack:
        case "noise":
            return [filler.DULL] * (budget // len(filler.DULL.split()) + 1)
        case "text":
            return filler.excerpt(pieces, budget // 2, rng)
        case _:
            others = (
                (_drawn(kind.keys, rng), _drawn(kind.values, rng))
                for _ in range(budget // MIN_NEEDLE_TOKENS)
            )
            return [_needle(kind, key, value) for key, value in others if key not in taken]


def _needle(kind: NeedleKind, key: str, value: str) -> str:
    return NEEDLE.format(things=kind.values, key=key, value=value)


def _drawn(kind: str, rng: np.random.Generator) -> str:
    match kind:
        case "numbers":
            return str(rng.integers(1_000_000, 10_000_000))
        case "uuids":
            return str(uuid.UUID(bytes=rng.bytes(16), version=4))
        case _:
            return "-".join(str(rng.choice(word_lists()[kind])) for kind in ("adjectives", "nouns"))


@functools.cache
def word_lists() -> dict[str, list[str]]:
    """Return English words: adjectives, nouns and other things, each in one list."""
    resource = importlib.resources.files("kvq_tools.evaluation.tasks") / "words.json"
    return json.loads(resource.read_text(encoding="utf-8"))


def from_file(
    path: str | Path,
    prompts: TaskPrompts,
    *,
    limit: int | None = None,
    suffix: str = "",
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Read samples from a JSON-lines file in RULER's format: `input` (the whole prompt, or up to
    `answer_prefix`) and `outputs`."""
    samples = []
    for row in read_rows(path, FIELDS, limit):
        prefix = row.get("answer_prefix") or ""
        ids = prompts.ids(row["input"].removesuffix(prefix), prefix + suffix)
        labels = {
            "length": len(ids) + max_new_tokens,
            "depth": filler.depth_of(row["outputs"][0], row["input"]),
        }
        samples.append(TaskSample(tuple(ids), tuple(row["outputs"]), max_new_tokens, labels))
    return samples
