"""Regular expressions on names of modules, matched in time that grows with the name's length alone.

A checkpoint brings both the expression and the names, and Python's `re` takes time that doubles
with every letter for some of them. What is read: letters, `.`, `\\d`, `\\w`, `\\s` and their
opposites, `[...]`, groups, `|`, `*`, `+`, `?`, `^` and `$`. An expression becomes a graph of
states, and the sets of states that a name passes through are kept by letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

MAX_LENGTH, MAX_DEPTH, MAX_KEPT = 256, 16, 10_000
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)
_QUANTIFIERS = ("*", "+", "?")
_ACCEPT = -1

# what leads on from a state: a letter that passes a test, a name's start "^" or end "$", or nothing
Step: TypeAlias = "Callable[[str], object] | str | None"


class NamePattern:
    """A regular expression, which `matches` the start of a name as `re.match` does.

    Raises ValueError, in one line, for what is not read.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} letters; at most {MAX_LENGTH} are read")
        self._tokens, self._depth = _TOKEN.findall(pattern), 0
        self._states: list[tuple[Step, tuple[int, ...]]] = []  # with the states that follow
        start = self._alternatives(_ACCEPT)
        if self._tokens:
            raise ValueError(f"{self._tokens[0]!r} closes nothing")
        self._start = self._closure(frozenset({start}), "^")
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Return True if the expression matches the start of a name."""
        states = self._start
        for letter in name:
            if _ACCEPT in states:
                return True
            if len(self._next) > MAX_KEPT:
                self._next.clear()
            key = states, letter
            if key not in self._next:
                self._next[key] = self._after(states, letter)
            states = self._next[key]
            if not states:
                return False
        return _ACCEPT in self._closure(states, "$")

    def _after(self, states: frozenset[int], letter: str) -> frozenset[int]:
        steps = [self._states[state] for state in states if state != _ACCEPT]
        following = (after for step, after in steps if callable(step) and step(letter))
        return self._closure(frozenset(state for after in following for state in after))

    def _closure(self, states: frozenset[int], place: str = "") -> frozenset[int]:
        """Return states and those that follow without a letter, at the name's start or end."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            if state != _ACCEPT and self._states[state][0] in (None, place):
                more = set(self._states[state][1]) - reached
                reached |= more
                waiting += more
        return frozenset(reached)

    def _state(self, step: Step, *after: int) -> int:
        self._states.append((step, after))
        return len(self._states) - 1

    def _alternatives(self, after: int) -> int:
        """Read alternatives up to the end of their group. Return the state they start in."""
        starts = [self._sequence(after)]
        while self._tokens and self._tokens[0] == "|":
            self._tokens.pop(0)
            starts.append(self._sequence(after))
        return starts[0] if len(starts) == 1 else self._state(None, *starts)

    def _sequence(self, after: int) -> int:
        # each item ends in a state without a letter, which is led on to the next item
        start = end = self._state(None)
        while self._tokens and self._tokens[0] not in ("|", ")"):
            begin, finish = self._item()
            self._states[end] = (None, (begin,))
            end = finish
        self._states[end] = (None, (after,))
        return start

    def _item(self) -> tuple[int, int]:
        """Read a letter or a group and its quantifier. Return the states it starts and ends in."""
        token, end = self._tokens.pop(0), self._state(None)
        if token in ("(", "(?:"):
            if self._tokens and self._tokens[0] == "?":
                raise ValueError("groups that start with (? are not read, but for (?:")
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
            start = self._alternatives(end)
            if not self._tokens:
                raise ValueError("a group is not closed")
            self._tokens.pop(0)
            self._depth -= 1
        else:
            start = self._state(_step(token), end)
        if not self._tokens or self._tokens[0] not in _QUANTIFIERS:
            return start, end
        if token in ("^", "$"):
            raise ValueError(f"{self._tokens[0]!r} is not read after {token!r}")
        quantifier, finish = self._tokens.pop(0), self._state(None)
        if self._tokens and self._tokens[0] == "?":  # lazy, which finds the same names
            self._tokens.pop(0)
        self._states[end] = (None, (finish,) if quantifier == "?" else (finish, start))
        return (start if quantifier == "+" else self._state(None, start, finish)), finish


def _step(token: str) -> Step:
    if token in ("^", "$"):
        return token
    classes = (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")
    if token[0] == "\\" and (token == "\\" or token[1].isalnum()) and token not in classes:
        raise ValueError(f"{token!r} is not read")
    if token in (*_QUANTIFIERS, "[", "{", "}"):
        raise ValueError(f"{token!r} is not read there")
    try:
        return re.compile(token, re.DOTALL).fullmatch
    except re.error as error:
        raise ValueError(f"{token!r:.40} is not read: {error}") from None
