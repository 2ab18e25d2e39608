"""Synthetic retrieval documents: text in which something said once must be recalled later.

passkey   real text with a five-digit pass key in it, asked for at the end
needles   real text with several "special magic number for WORD" in it, some asked for at the end
records   many "WORD: VALUE" lines, then some of the keys again
repeat    random or shuffled tokens, repeated: what an induction head is for

The facts themselves are noise and carry no loss; answers carry a higher loss weight; the real text
around them carries the usual one. Document lengths are log-uniform up to the row, so distances from
fact to question range from a few tokens to the whole row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from laboratory.embedded_model.tokenizer import END_ID

PASSKEY_FACT = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
PASSKEY_PROMPT = "\nWhat is the pass key? The pass key is "
PASSKEY_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there.\n"
)
DULL_TEXT = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
NEEDLE_FACT = "\nOne of the special magic numbers for {word} is: {value}.\n"
NEEDLE_PROMPT = (
    "\nWhat is the special magic number for {word}? The special magic number for {word} is: "
)
ANSWER_WEIGHT = 5.0
MIN_DOCUMENT_LENGTH = 96
KIND_SHARES = (0.35, 0.25, 0.25, 0.15)  # passkey, needles, records, repeat
REPEAT_WEIGHT = 2.0
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


@dataclasses.dataclass
class Draft:
    """A document being written: token ids and the loss weight of each."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    weights: list[float] = dataclasses.field(default_factory=list)

    def add(self, tokens: list[int], weight: float) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class SyntheticRows:
    """A writer of synthetic rows; `stream` [tokens] is the real text they are built around."""

    tokenizer: Tokenizer
    stream: np.ndarray

    def row(self, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [length + 1], weights [length] fp32): whole documents, then real text up
        to the length."""
        row = Draft()
        while (room := length - len(row) - 1) >= MIN_DOCUMENT_LENGTH:
            budget = int(np.exp(rng.uniform(np.log(MIN_DOCUMENT_LENGTH), np.log(room + 1))))
            document = self.document(min(budget, room), rng)
            if len(row):
                row.add([END_ID], 0.0)
            row.tokens += document.tokens
            row.weights += document.weights
        row.add(self._real_text(length - len(row), rng), 1.0)
        return np.array([END_ID, *row.tokens], np.int32), np.array(row.weights, np.float32)

    def document(self, budget: int, rng: np.random.Generator) -> Draft:
        """Return one document of at most `budget` tokens."""
        kinds: list[Callable[[int, np.random.Generator], Draft]] = [
            self.passkey,
            self.needles,
            self.records,
            self.repeat,
        ]
        return kinds[rng.choice(len(kinds), p=KIND_SHARES)](budget, rng)

    def passkey(self, budget: int, rng: np.random.Generator) -> Draft:
        key = _digits(rng, 5)
        fact, prompt = self._encode(PASSKEY_FACT.format(key=key)), self._encode(PASSKEY_PROMPT)
        opening = (
            self._encode(PASSKEY_OPENING)
            if rng.random() < 0.4 and budget > 2 * MIN_DOCUMENT_LENGTH
            else []
        )
        answer = self._encode(key)
        room = max(0, budget - len(fact) - len(prompt) - len(answer) - len(opening))
        filler = self._dull_text(room) if rng.random() < 0.2 else self._real_text(room, rng)
        place = int(rng.integers(0, len(filler) + 1))
        draft = Draft()
        draft.add(opening, 1.0)
        draft.add(filler[:place], 1.0)
        draft.add(fact, 0.0)
        draft.add(filler[place:], 1.0)
        draft.add(prompt, 0.0)
        draft.add(answer, ANSWER_WEIGHT)
        return _cut(draft, budget)

    def needles(self, budget: int, rng: np.random.Generator) -> Draft:
        count = int(rng.integers(1, 1 + max(1, min(8, budget // 90))))
        pairs = [(self._word(rng), _digits(rng, int(rng.integers(4, 8)))) for _ in range(count)]
        facts = [self._encode(NEEDLE_FACT.format(word=word, value=value)) for word, value in pairs]
        asked = [pairs[i] for i in rng.permutation(count)[: max(1, count // 2)]]
        questions = [
            (self._encode(NEEDLE_PROMPT.format(word=word)), self._encode(value))
            for word, value in asked
        ]
        room = (
            budget
            - sum(map(len, facts))
            - sum(len(prompt) + len(answer) for prompt, answer in questions)
        )
        filler = self._real_text(max(0, room), rng)
        draft, done = Draft(), 0
        for fact, place in zip(
            facts, np.sort(rng.integers(0, len(filler) + 1, count)), strict=True
        ):
            draft.add(filler[done:place], 1.0)
            draft.add(fact, 0.0)
            done = int(place)
        draft.add(filler[done:], 1.0)
        for prompt, answer in questions:
            draft.add(prompt, 0.0)
            draft.add(answer, ANSWER_WEIGHT)
        return _cut(draft, budget)

    def records(self, budget: int, rng: np.random.Generator) -> Draft:
        numeric = rng.random() < 0.5
        written: list[tuple[list[int], list[int]]] = []
        draft = Draft()
        while len(draft) < 0.6 * budget:
            key = self._encode(f"{self._word(rng)}: " if numeric else f"{self._word(rng)}:")
            value = self._encode(_digits(rng, 4) if numeric else f" {self._word(rng)}")
            written.append((key, value))
            draft.add([*key, *value, *self._encode("\n")], 0.0)
        draft.add(self._encode("\n"), 0.0)
        for index in rng.permutation(len(written)):
            key, value = written[index]
            if len(draft) + len(key) + len(value) + 1 > budget:
                break
            draft.add(key, 0.0)
            draft.add(value, ANSWER_WEIGHT / 2)
            draft.add(self._encode("\n"), 0.0)
        return _cut(draft, budget)

    def repeat(self, budget: int, rng: np.random.Generator) -> Draft:
        length = int(np.exp(rng.uniform(np.log(8), np.log(budget // 2))))
        tokens = (
            rng.integers(1, self.tokenizer.get_vocab_size(), length)
            if rng.random() < 0.5
            else self._real_text(length, rng)
        )
        segment = [int(token) for token in rng.permutation(tokens)]
        draft = Draft()
        draft.add(segment, 0.0)
        while len(draft) + length <= budget:
            draft.add(segment[:1], 0.0)
            draft.add(segment[1:], REPEAT_WEIGHT)
        return draft

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _real_text(self, length: int, rng: np.random.Generator) -> list[int]:
        start = int(rng.integers(0, len(self.stream) - length + 1))
        return self.stream[start : start + length].tolist()

    def _dull_text(self, length: int) -> list[int]:
        sentence = self._encode(DULL_TEXT)
        return (sentence * (length // len(sentence) + 1))[:length]

    def _word(self, rng: np.random.Generator) -> str:
        """Return three to six random letters."""
        return "".join(rng.choice(LETTERS, int(rng.integers(3, 7))))


def _digits(rng: np.random.Generator, count: int) -> str:
    return "".join(str(digit) for digit in rng.integers(0, 10, count))


def _cut(draft: Draft, budget: int) -> Draft:
    return Draft(draft.tokens[:budget], draft.weights[:budget])
