"""Variable tracking, common words and frequent words: RULER's other tasks that need no data (Hsieh
et al. 2024, 3.2 and 3.3).

Prompts (Table 8) and settings are RULER's: a chain of four hops; ten common words, all asked for;
words from a Zeta distribution with alpha = 2, three of them asked for. Its word list is not part of
kvq (here: about 600 words). The example before variable tracking hides its chain in fewer lines
than RULER's, so that it does not take half of a prompt of 1,024 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from kvq_tools.evaluation.tasks.filler import DULL, fitted, generator
from kvq_tools.evaluation.tasks.kinds import RULER_TOKENS as MAX_NEW_TOKENS
from kvq_tools.evaluation.tasks.niah import word_lists
from kvq_tools.evaluation.tasks.sample import LENGTH_RULE, TaskPrompts, TaskSample

HOPS = 4  # assignments of a variable to the next
EXAMPLE_LINES = 6  # lines of noise in the example of variable tracking
COMMON = 10  # words that are asked for
ALPHA, ZETA = 2.0, np.pi**2 / 6  # the distribution of coded words, and its sum of k^-alpha
CODED = 3  # coded words that are asked for: the most frequent ones except the noise
CODED_LETTERS = 6
DOTS = "..."
MIN_WORDS = 64  # in a shorter coded text the fourth word may be as frequent as the third

VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following"
    " text.\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in the"
    " text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are:"
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others."
    " Memorize the ones that appear most often.\n{context}\nQuestion: What are the {count} most"
    " common words in the above list?"
)
CWE_PREFIX = " Answer: The top {count} words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most"
    " frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please"
    " ignore the dots '....'. What are the three most frequently appeared words in the above coded"
    " text?"
)
FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)

RULES = {
    "vt": {
        "prompt": VT + VT_PREFIX.format(count=HOPS + 1, value="{value}"),
        "example": (
            "one with its answer stands before the prompt, with names of three letters and"
            f" {EXAMPLE_LINES} lines of noise"
        ),
        "context": (
            f"lines of {DULL!r}, and, in order and anywhere between them, VAR A = value, VAR B ="
            f" VAR A, ...: {HOPS} hops"
        ),
    },
    "cwe": {
        "prompt": (CWE + CWE_PREFIX).format(count=COMMON, context="{context}"),
        "example": "one with its answer stands before the prompt: a shorter list of other words",
        "context": (
            f"{COMMON} words 30 times each and others 3 times, in any order; below 4096 tokens 6"
            " times and once"
        ),
    },
    "fwe": {
        "prompt": FWE + FWE_PREFIX,
        "context": (
            f"the word of rank k takes k^-{ALPHA:g} / zeta({ALPHA:g}) of all places, in any order;"
            f" rank 1 is {DOTS!r}"
        ),
    },
}
SCORING = {
    "length": LENGTH_RULE,
    "score": "share of the words asked for that the answer contains, in upper or lower case",
}


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """The content of one sample.

    question   (units of filler) -> the prompt up to the question
    prefix     the beginning of the answer
    answers    all are asked for
    most       the largest number of units of filler
    """

    question: Callable[[int], str]
    prefix: str
    answers: tuple[str, ...]
    maximum: int


def generated(
    prompts: TaskPrompts,
    kind: str,
    *,
    lengths: Sequence[int],
    count: int,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> list[TaskSample]:
    """Make `count` samples for each length. The same arguments give the same samples. kind: a name
    in KINDS, with RULER's max_new_tokens by default.

    Raises ValueError if a length has no room for the question, or there are too few words to fill
    it.
    """
    new = max_new_tokens or MAX_NEW_TOKENS[kind]
    return [
        _sample(prompts, kind, length, generator(seed, length, 0, i), new)
        for length in lengths
        for i in range(count)
    ]


def _sample(
    prompts: TaskPrompts, kind: str, length: int, rng: np.random.Generator, max_new_tokens: int
) -> TaskSample:
    budget = length - max_new_tokens
    puzzle = KINDS[kind](length, rng)
    ids = fitted(lambda n: prompts.ids(puzzle.question(n), puzzle.prefix), puzzle.maximum, budget)
    if len(ids) < 0.8 * budget:
        raise ValueError(
            f"{kind} has too few different words to fill {length} tokens: give shorter lengths"
        )
    return TaskSample(tuple(ids), puzzle.answers, max_new_tokens, {"length": length})


def variable_tracking(length: int, rng: np.random.Generator) -> Puzzle:
    """Draw a chain of variables, and another for the example. A unit is a line of noise."""
    example, asked = _Chain.drawn(3, rng), _Chain.drawn(5, rng)
    while asked.value == example.value:
        asked = _Chain.drawn(5, rng)
    shown = f"{example.question(EXAMPLE_LINES)}{example.prefix} {' '.join(example.names)}\n\n"
    return Puzzle(
        lambda lines: shown + asked.question(lines),
        asked.prefix,
        asked.names,
        length // len(DULL.split()) + 1,
    )


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Variables with one value: it is assigned to the first, and each other one gets the variable
    before."""

    names: tuple[str, ...]
    value: str
    depths: tuple[float, ...]  # those of the assignments, in order

    @staticmethod
    def drawn(letters: int, rng: np.random.Generator) -> _Chain:
        names = _different(HOPS + 1, lambda: _letters(string.ascii_uppercase, letters, rng))
        return _Chain(
            names,
            str(rng.integers(10_000, 100_000)),
            tuple(sorted(rng.random(len(names)).tolist())),
        )

    @property
    def prefix(self) -> str:
        return VT_PREFIX.format(count=len(self.names), value=self.value)

    def question(self, noise: int) -> str:
        lines = [DULL] * noise
        values = (self.value, *(f"VAR {name}" for name in self.names))
        for depth, name, value in reversed(
            list(zip(self.depths, self.names, values[:-1], strict=True))
        ):
            lines.insert(round(depth * noise), f"VAR {name} = {value}")
        return VT.format(context="\n".join(lines), value=self.value)


@dataclasses.dataclass(frozen=True)
class _Frequencies:
    """Occurrences of common and other words in a list and in its example, and the number of other
    words in the example."""

    common: int
    other: int
    example_common: int
    example_other: int
    example_others: int


SHORT, LONG = _Frequencies(6, 1, 3, 1, 10), _Frequencies(30, 3, 10, 3, 30)
LONG_FROM = 4096  # tokens


def common_words(length: int, rng: np.random.Generator) -> Puzzle:
    """Draw a list with common words, and a shorter one of other words for the example. A unit is a
    word that is not common. When the list has all words, further units repeat them, as long as the
    common ones are more frequent."""
    often = SHORT if length < LONG_FROM else LONG
    words = [str(word) for word in rng.permutation(list(itertools.chain(*word_lists().values())))]
    answers: list[str] = []
    while len(answers) < COMMON:
        word = words.pop()
        if not any(word in other or other in word for other in answers):
            answers.append(word)
    # an answer is part of no other word
    words = [word for word in words if not any(answer in word for answer in answers)]
    example, rest = words[: COMMON + often.example_others], words[COMMON + often.example_others :]
    prefix = CWE_PREFIX.format(count=COMMON)
    maximum = len(rest) * ((often.common - 1) // often.other)
    places = rng.random(COMMON * often.common + maximum * often.other)

    def asked(entries: Sequence[str]) -> str:
        return CWE.format(context=_numbered(_shuffled(entries, places)), count=COMMON)

    def question(others: int) -> str:
        return shown + asked(
            answers * often.common
            + list(itertools.islice(itertools.cycle(rest), others)) * often.other
        )

    listed = example[:COMMON] * often.example_common + example[COMMON:] * often.example_other
    shown = f"{asked(listed)}{prefix} {_numbered(example[:COMMON])}\n\n"
    return Puzzle(question, prefix, tuple(answers), maximum)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(length: int, rng: np.random.Generator) -> Puzzle:
    """Draw coded words, one for every 50 tokens as in RULER. The first is dots. A unit is a place
    in the text."""
    words = (
        DOTS,
        *_different(
            max(length // 50, 2 * CODED),
            lambda: _letters(string.ascii_lowercase, CODED_LETTERS, rng),
        ),
    )
    places = rng.random(MIN_WORDS + length)

    def question(more: int) -> str:
        counts = ((MIN_WORDS + more) * np.arange(1, len(words) + 1) ** -ALPHA / ZETA).astype(int)
        return FWE.format(context=" ".join(_shuffled(np.repeat(words, counts).tolist(), places)))

    return Puzzle(question, FWE_PREFIX, words[1 : CODED + 1], length)


def _shuffled(words: Sequence[str], places: Float[np.ndarray, " most"]) -> list[str]:
    """Order words by the places of the first, the second, ...: the order depends only on the words
    and the places."""
    order: list[int] = np.argsort(places[: len(words)]).tolist()
    return [words[i] for i in order]


def _letters(alphabet: str, count: int, rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(alphabet), count))


def _different(count: int, draw: Callable[[], str]) -> tuple[str, ...]:
    """Draw until there are `count` different texts."""
    texts = dict[str, None]()
    while len(texts) < count:
        texts[draw()] = None
    return tuple(texts)


KINDS = {"vt": variable_tracking, "cwe": common_words, "fwe": frequent_words}
