"""The kinds of tasks, and the longest answer of each."""

from __future__ import annotations

import dataclasses

PASSKEY_TOKENS = 16
NEEDLE_TOKENS = 128
RULER_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50}


@dataclasses.dataclass(frozen=True)
class NeedleKind:
    """One of RULER's tasks: the kinds of haystack, keys and values, and the number of each."""

    haystack: str  # noise, text, needles
    keys: str = "words"
    values: str = "numbers"
    needles: int = 1
    values_each: int = 1
    asked: int = 1

    @property
    def single(self) -> bool:
        return self.asked * self.values_each == 1


NEEDLE_KINDS = {
    "single_1": NeedleKind("noise"),
    "single_2": NeedleKind("text"),
    "single_3": NeedleKind("text", values="uuids"),
    "multikey_1": NeedleKind("text", needles=4),
    "multikey_2": NeedleKind("needles"),
    "multikey_3": NeedleKind("needles", keys="uuids", values="uuids"),
    "multivalue": NeedleKind("text", values_each=4),
    "multiquery": NeedleKind("text", needles=4, asked=4),
}
