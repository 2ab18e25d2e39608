"""Tool calls: after a long history of requests and calls, one more call in JSON is to be written.

The answer has to be one JSON object that is valid against the schema of the tool asked for. The
schemas stand at the beginning only, so a cache that blurs far tokens loses names of fields, quotes
and braces.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvq_tools.evaluation.tasks.filler import fitted, generator
from kvq_tools.evaluation.tasks.niah import word_lists
from kvq_tools.evaluation.tasks.sample import AnswerRule, Scores, TaskPrompts, TaskSample

OPENING = "You answer each request with one call of a tool, in JSON. The tools and their fields:"
MAX_NEW_TOKENS = 64
TURN = "\nRequest: {request}\nCall: "
TYPES: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool}


class Tool(NamedTuple):
    """A tool: its name, the types of its fields, a request in words, and values for its fields."""

    name: str
    fields: Mapping[str, str]
    request: str
    draw: Callable[[np.random.Generator], dict[str, Any]]


def _word(kind: str, rng: np.random.Generator) -> str:
    return str(rng.choice(word_lists()[kind]))


def _number(low: int, high: int) -> Callable[[np.random.Generator], int]:
    return lambda rng: int(rng.integers(low, high))


TOOLS = (
    Tool(
        "book_room",
        {"guest": "string", "nights": "integer", "quiet_side": "boolean"},
        "{guest} wants a room for {nights} nights, quiet side: {quiet_side}.",
        lambda rng: {
            "guest": _word("nouns", rng).title(),
            "nights": _number(1, 30)(rng),
            "quiet_side": bool(rng.integers(2)),
        },
    ),
    Tool(
        "send_parcel",
        {"content": "string", "receiver": "string", "grams": "integer"},
        "Send a {content} to {receiver}, it weighs {grams} grams.",
        lambda rng: {
            "content": f"{_word('adjectives', rng)} {_word('nouns', rng)}",
            "receiver": _word("nouns", rng).title(),
            "grams": _number(100, 10_000)(rng),
        },
    ),
    Tool(
        "set_alarm",
        {"hour": "integer", "minute": "integer", "label": "string"},
        "Wake me at {hour}:{minute} and call it {label}.",
        lambda rng: {
            "hour": _number(0, 24)(rng),
            "minute": _number(10, 60)(rng),
            "label": _word("nouns", rng),
        },
    ),
)

RULES = {
    "prompt": f"{OPENING} [schemas], then turns of {TURN!r} and the call",
    "length": (
        "tokens of the prompt and of max_new_tokens; the prompt is at most that long, and nothing"
        " is cut"
    ),
    "score": (
        "accuracy: 1 if the answer's first line is a JSON object that is valid against the tool's"
        " schema, with all fields of the right types and no others; right: 1 if its values are the"
        " request's, too"
    ),
}


def score(sample: TaskSample, text: str) -> Scores:
    """Return `accuracy`, 1 for a call that is valid against the tool's schema, and `right`, 1 if
    its values are right as well."""
    wanted = json.loads(sample.answers[0])
    try:
        call = json.loads(text.strip().partition("\n")[0])
    except (ValueError, RecursionError):
        call = None
    valid = is_valid(call, wanted["tool"])
    return {"accuracy": float(valid), "right": float(valid and call == wanted)}


def is_valid(call: Any, name: str) -> bool:
    """Return True if a call is an object with the tool's name and arguments of its schema."""
    (tool,) = (tool for tool in TOOLS if tool.name == name)
    if not isinstance(call, dict) or call.keys() != {"tool", "arguments"}:
        return False
    arguments = call["arguments"]
    return (
        call["tool"] == name
        and isinstance(arguments, dict)
        and arguments.keys() == tool.fields.keys()
        and all(type(arguments[field]) is TYPES[kind] for field, kind in tool.fields.items())
    )


def finished(sample: TaskSample, text: str) -> bool:
    """Return True if the first line has ended."""
    return "\n" in text.lstrip()


TASK = AnswerRule(score, finished)


def generated(
    prompts: TaskPrompts,
    *,
    lengths: Sequence[int],
    count: int,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[TaskSample]:
    """Make `count` samples for each length. The same arguments give the same samples. Raises
    ValueError if a length has no room for one turn of each tool."""
    return [
        _sample(prompts, length, i, generator(seed, length, 0, i), max_new_tokens)
        for length in lengths
        for i in range(count)
    ]


def _sample(
    prompts: TaskPrompts, length: int, index: int, rng: np.random.Generator, max_new_tokens: int
) -> TaskSample:
    asked = TOOLS[index % len(TOOLS)]
    schemas = "\n".join(f"{tool.name}: {json.dumps(dict(tool.fields))}" for tool in TOOLS)
    request, answer = _turn(asked, rng)
    maximum = max(length // 16, 1)  # a turn takes more tokens than that
    tools = itertools.islice(itertools.cycle(TOOLS), maximum)
    turns = [TURN.format(request=r) + a for r, a in (_turn(tool, rng) for tool in tools)]

    def build(count: int) -> list[int]:
        history = "".join(turns[: count + len(TOOLS)])
        return prompts.ids(f"{OPENING}\n{schemas}{history}", TURN.format(request=request).rstrip())

    ids = fitted(build, max(maximum - len(TOOLS), 0), length - max_new_tokens)
    labels = {"length": length, "tool": asked.name}
    return TaskSample(tuple(ids), (answer,), max_new_tokens, labels)


def _turn(tool: Tool, rng: np.random.Generator) -> tuple[str, str]:
    """Return a request in words and the call that answers it."""
    values = tool.draw(rng)
    call = json.dumps({"tool": tool.name, "arguments": values})
    return tool.request.format(**values), call
