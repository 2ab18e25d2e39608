"""The report of the serving benchmark, as a file, as lines of text and as a page."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from benchmarks.markdown import head, table
from benchmarks.report_file import Report

ALONE = 0  # slots of the row of one request at a time


@dataclasses.dataclass(frozen=True)
class ServingRow:
    """All requests through `slots` slots, or one at a time by `generate` if slots is 0.

    activations: the dtype that packed weights multiply, "float32" or "int8".
    prompt, new: least and most tokens of a request.
    first_token: seconds from the start, of each request.
    """

    cache: str
    activations: str
    prompt: tuple[int, ...]
    new: tuple[int, ...]
    slots: int
    requests: int
    new_tokens: int
    seconds: float
    first_token: tuple[float, ...]
    cache_bytes: int

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def work(self) -> tuple[object, ...]:
        """Return what rows with other numbers of slots served too."""
        return self.cache, self.activations, tuple(self.prompt), tuple(self.new)

    @property
    def lengths(self) -> str:
        """The least and most tokens of prompts and answers."""
        return f"{self.prompt[0]}-{self.prompt[1]}, {self.new[0]}-{self.new[1]}"


@dataclasses.dataclass(frozen=True)
class RoomRow:
    """The number of sequences of `capacity` tokens that fit `memory` bytes, counting the row in
    which prompts are read. Exact."""

    cache: str
    capacity: int
    memory: int
    sequences: int
    sequence_bytes: int


@dataclasses.dataclass(frozen=True)
class PrefixRow:
    """Seconds from a prompt of `tokens` tokens to its first token: read by the model, found in
    memory, and found in files (`disk`), which were just written: they lie in the page cache."""

    cache: str
    tokens: int
    read: float
    memory: float
    disk: float
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingReport(Report):
    """Rows and what they were measured on.

    model: the model as it was named.
    cores: cores of the machine.
    """

    model: str
    cores: int
    capacity: int
    rows: tuple[ServingRow, ...]
    room: tuple[RoomRow, ...]
    prefixes: tuple[PrefixRow, ...]

    def times_of(self, row: ServingRow, slots: int) -> str:
        """Return how many times faster a row is than the same work through `slots`, or ""."""
        same = (one for one in self.rows if one.work == row.work and one.slots == slots)
        return next((f"{one.seconds / row.seconds:.2f}" for one in same), "")


def page(report: ServingReport, file: pathlib.Path) -> str:
    """Render the three tables."""
    said = (
        f"{report.cores} cores. Requests of {report.model} come all at once, greedy; caches hold"
        f" {report.capacity} tokens a sequence. One at a time is `generate`; first tokens are"
        " counted from the start, so they wait for the requests before."
    )
    parts = head(report, file, said)
    lines = []
    for row in report.rows:
        times = report.times_of(row, ALONE), report.times_of(row, 1)
        slots = "one at a time" if row.slots == ALONE else str(row.slots)
        rates = f"{row.requests_per_second:.3f}", f"{row.new_tokens / row.seconds:.1f}"
        waits = f"{np.median(row.first_token):.2f} s", f"{max(row.first_token):.2f} s"
        size = f"{row.cache_bytes / 1e6:.1f}"
        work = f"`{row.cache}`", row.activations, row.lengths
        lines.append((*work, slots, *rates, *times, *waits, size))
    names = (
        "cache",
        "activations",
        "prompt, new tokens",
        "slots",
        "requests/s",
        "tokens/s",
        "times one at a time",
        "times one slot",
        "first token, median",
        "last",
        "cache MB",
    )
    parts.append(table(names, lines))
    for memory in dict.fromkeys(row.memory for row in report.room):
        parts.append(
            f"## Sequences of {report.capacity} tokens in {memory / 2**30:g} GiB\n\nCounted from"
            " the layout, bfloat16 rows."
        )
        room = [
            (f"`{row.cache}`", f"{row.sequences:,}", f"{row.sequence_bytes:,}")
            for row in report.room
            if row.memory == memory
        ]
        parts.append(table(("cache", "sequences", "bytes each"), room))
    if report.prefixes:
        parts.append(
            "## Prefixes\n\nSeconds to the first token of a prompt that was read before, beside"
            " reading it."
        )
        times = [
            (
                f"`{row.cache}`",
                f"{row.tokens:,}",
                f"{row.read:.2f} s",
                *_saved(row.read, row.memory),
                *_saved(row.read, row.disk),
            )
            for row in report.prefixes
        ]
        parts.append(
            table(
                (
                    "cache",
                    "tokens",
                    "read",
                    "from memory",
                    "times faster",
                    "from files in the page cache",
                    "times faster",
                ),
                times,
            )
        )
    return "\n\n".join(parts)


def _saved(read: float, seconds: float) -> tuple[str, str]:
    return f"{seconds:.3f} s", f"{read / seconds:.0f}"
