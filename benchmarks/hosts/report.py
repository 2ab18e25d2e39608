"""The report of `python -m benchmarks.hosts`, and its page."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

from benchmarks.markdown import head, table
from benchmarks.report_file import Report
from benchmarks.turns import Cycle, cycle

HOSTS_OWN = "the host's own"
CACHES = "dense", "kivi:bits=4"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A cache of kvq beside the host's own: the largest relative error of logits, and the tokens
    that the host's greedy sampler draws before the first that differs, of all."""

    cache: str
    error: float
    equal_tokens: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Lines of code of an adapter and of its user, and what its caches change in answers."""

    host: str
    version: str
    adapter_lines: int
    your_lines: int
    comparisons: tuple[Comparison, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step through one cache.

    wall_ms, cpu_ms: of each round, and of CPU time of all threads. The last round fills the cache
        to `tokens` tokens.
    error: of the first step's logits, relative to the host's own cache with the same rows.
    """

    host: str
    cache: str
    tokens: int
    batch: int
    cache_bytes: int
    error: float
    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def cycle(self) -> Cycle:
        """Return which rounds quantized a block."""
        rounds = len(self.wall_ms)
        return (
            Cycle() if self.cache == HOSTS_OWN else cycle(self.cache, self.tokens - rounds, rounds)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsReport(Report):
    """Adapters and steps. missing: why each other host was not measured. load: the machine's load
    average of one minute before each host, and at the end."""

    cpu: str
    cores: int
    load: tuple[float, ...]
    shapes: str
    adapters: tuple[Adapter, ...]
    steps: tuple[Step, ...]
    missing: dict[str, str]


LINES = """\
The adapter's lines are those of its file, documentation left out; the caller's are written in the
host's code, plans included. The host's own greedy sampler continues two prompts of which one is
padded, if the host pads. An error is the largest of a row of logits, relative to the host's own
cache, up to the first token that differs."""
TIMES = """\
The caches hold the same random keys and values, and take a step in turns. Milliseconds are of wall
time and of the CPU time of all threads, and a ratio is of times in the same round. Each is the
median p of the rounds, or (1 - 1/block) p + q/block if the cache quantizes a block of tokens in one
step of `block`, which takes q: what a step takes on average. Errors are those of a step's logits:
`dense` shows that positions and masks are the host's. A packed cache's error over random keys says
nothing about texts: the sharper a random model's attention, the larger it is."""


def page(report: HostsReport, file: pathlib.Path) -> str:
    """Render the page of a report."""
    loads = f"{min(report.load):g} to {max(report.load):g}"
    said = f"{report.cpu}, {report.cores} cores; load average of the machine meanwhile: {loads}."
    names = [f"`{c}`: {value}" for c in CACHES for value in ("error", "equal tokens")]
    header = ("host", "version", "adapter's lines", "caller's lines", *names)
    missing = [f"- {host} was not measured: {why}" for host, why in report.missing.items()]
    return "\n\n".join(
        [
            *head(report, file, said),
            report.shapes,
            *(["\n".join(missing)] if missing else []),
            "## Lines, errors and tokens",
            LINES,
            table(header, map(_adapter, report.adapters)),
            "## Bytes and times of a decode step",
            TIMES,
            table(
                ("host", "tokens", "cache", "MiB", "ms", "ratio", "CPU ms", "CPU ratio", "error"),
                _steps(report.steps),
            ),
        ]
    )


def _adapter(one: Adapter) -> tuple[str, ...]:
    compared = ((f"{c.error:.1e}", f"{c.equal_tokens} of {c.tokens}") for c in one.comparisons)
    lines = str(one.adapter_lines or "none"), str(one.your_lines)
    return one.host, one.version, *lines, *itertools.chain(*compared)


def _steps(steps: tuple[Step, ...]) -> list[tuple[str, ...]]:
    lines = []
    for (host, tokens), group in itertools.groupby(steps, key=lambda s: (s.host, s.tokens)):
        rows = list(group)
        base = next(row for row in rows if row.cache == HOSTS_OWN)
        lines += [
            (
                host,
                str(tokens),
                row.cache if row is base else f"`{row.cache}`",
                f"{row.cache_bytes / 2**20:.1f}",
                *_time(row.cycle, row.wall_ms, base.wall_ms),
                *_time(row.cycle, row.cpu_ms, base.cpu_ms),
                "" if row is base else f"{row.error:.1e}",
            )
            for row in rows
        ]
    return lines


def _time(cycle: Cycle, samples: tuple[float, ...], base: tuple[float, ...]) -> tuple[str, str]:
    return f"{cycle.step(samples):.1f}", f"{cycle.ratio(samples, base):.2f}"
