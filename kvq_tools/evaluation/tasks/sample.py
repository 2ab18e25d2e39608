"""Tasks: prompts with known answers, and a rule that scores the generated text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvq_jax.files.json_text import parse_json
from kvq_tools.growing_text import decoded

LENGTH_RULE = (
    "tokens of the prompt and of max_new_tokens; the prompt is at most that long, and nothing is"
    " cut"
)

Scores = dict[str, float]  # by metric, each between 0 and 1; the first is the task's main metric


@dataclasses.dataclass(frozen=True)
class TaskSample:
    """A prompt and its correct answers.

    prompt          token ids
    answers         correct answers; the task says if one or all of them are wanted
    max_new_tokens  the most tokens that may be generated
    labels          values that tables group by, such as length and depth
    facts           further facts for the output, such as the hidden needles
    """

    prompt: tuple[int, ...]
    answers: tuple[str, ...]
    max_new_tokens: int
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AnswerRule:
    """A rule for answers.

    score       the scores of the text generated for a sample
    finished    true once more text cannot change the scores, so that generation may end
    """

    score: Callable[[TaskSample, str], Scores]
    finished: Callable[[TaskSample, str], bool]


@dataclasses.dataclass(frozen=True)
class TaskPrompts:
    """Turn texts into prompts. `chat`, if given, encodes a text as a user's turn, up to the
    beginning of the answer."""

    tokenizer: Any
    chat: Callable[[str], list[int]] | None = None

    def ids(self, question: str, answer_prefix: str = "") -> list[int]:
        """Return the prompt's tokens. The answer's first words are outside the user's turn."""
        if self.chat is None:
            # no warnings about lengths, which are checked later
            return list(self.tokenizer(question + answer_prefix, verbose=False).input_ids)
        return self.chat(question) + list(
            self.tokenizer(answer_prefix, add_special_tokens=False).input_ids
        )

    def decode(self, ids: list[int]) -> str:
        return decoded(self.tokenizer, ids)


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields that each object of a file must have.

    required    types by name; a list holds at least one text
    optional    types by name, if the field is there and not null; a list holds texts
    filled      required fields whose texts are not empty
    """

    required: Mapping[str, type]
    optional: Mapping[str, type] = dataclasses.field(default_factory=dict)
    filled: tuple[str, ...] = ()


def read_rows(path: str | Path, fields: Fields, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, at most `limit`, without the byte-order mark that
    some editors write. Raise ValueError, naming the line, if its fields do not fit."""
    rows = []
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(rows) == limit:
                    break
                if line.strip():
                    rows.append(_row(line, fields, f"{str(path)!r}, line {number}"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text; save it as UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{str(path)!r} has no samples")
    return rows


def _row(line: str, fields: Fields, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object, not a {type(row).__name__}")
    for name, kind in fields.required.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{where}: needs the field {name!r}, a {kind.__name__}")
        if kind is list and not row[name]:
            raise ValueError(f"{where}: the field {name!r} must list at least one text")
    for name, kind in {**fields.required, **fields.optional}.items():
        if row.get(name) is not None:
            _check(row[name], kind, f"{where}: the field {name!r}", name in fields.filled)
    return row


def _check(value: Any, kind: type, field: str, filled: bool) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{field} must be a {kind.__name__}, not a {type(value).__name__}")
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{field} must list texts only")
    if filled and not all(texts):
        raise ValueError(f"{field} has an empty text")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{field} is not a text: {error}") from error
