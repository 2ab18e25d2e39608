"""The JSON file of requests, and its page: a table for each model and number of cores."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import statistics
import textwrap
from typing import Self

from benchmarks.cpu.request.goals import goals
from benchmarks.cpu.request.plan import ATTENTION, METHODS, ONNX, Cell
from benchmarks.markdown import head, table
from benchmarks.report_file import Report

BLOCK = 32  # tokens that kvq's packed caches quantize together

ABOUT = """\
One sequence, greedy. Every row is a process of its own, with the number of cores in its row. First
token: from the ids of the prompt to the first token, with the model loaded and all programs
compiled; the median of three readings if the prompt has at most 1,024 tokens. ms a token: the mean
of the last {counted} tokens: kvq's packed caches quantize a block in one step of 32, and so exactly
that share counts. kvq generates 8 tokens a call, as `kvq generate` does. Peak: the most memory
that the process held, its libraries and, as far as it was read, a mapped file included. SmolLM2 was
trained for 8,192 positions: longer prompts show its speed alone."""
OF_ATTENTION = """\
Rows of one layer's attention alone add the prompt's rows to the cache and attend, then do so for
one token at a time. Products alone are what no attention can do without, in XLA: a prompt's
multiplications at the speed of the fastest product of square matrices, and for a token
a softmax between two products with all keys and values."""
OLDER = {
    ONNX: "random rows were drawn inside the clock, and a prompt was read once, the first time"
}


@dataclasses.dataclass(frozen=True)
class RequestRow:
    """A measurement, or the reason for which there is none.

    load: the machine's load average of one minute when it began.
    each: tokens of a sample.
    cpu, commit: the processor, and the project's sources, that measured it.
    method: how, by the numbers of plan.METHODS.
    """

    model: str
    system: str
    way: str
    prompt: int
    cores: int
    version: str = ""
    first_ms: float = 0.0
    samples_ms: tuple[float, ...] = ()
    peak_bytes: int = 0
    load: float = 0.0
    skipped: str = ""
    each: int = 1
    cpu: str = ""
    commit: str = ""
    method: int = 1

    @property
    def cell(self) -> Cell:
        return Cell(self.model, self.system, self.way, self.prompt, self.cores)

    @property
    def step_ms(self) -> float:
        """Return the milliseconds of a token: the mean of the last whole blocks of tokens, so that
        a step which quantizes one counts once a block. It is that of all samples if they are
        fewer."""
        samples = BLOCK // self.each
        last = len(self.samples_ms) // samples * samples
        return statistics.fmean(self.samples_ms[-last:])

    @property
    def current(self) -> bool:
        """Return True if the row was measured as it would be today."""
        return self.method == METHODS.get(self.system, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestReport(Report):
    """cpu: of this machine, the rows' too. steps: tokens after the first, of every row."""

    cpu: str
    cores: int
    steps: int
    rows: tuple[RequestRow, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Rows of older ones are of the header's processor and commit."""
        report = super().read(path)
        return dataclasses.replace(report, rows=tuple(map(report._completed, report.rows)))

    def _completed(self, row: RequestRow) -> RequestRow:
        if row.cpu:
            return row
        each = self.steps // max(1, len(row.samples_ms)) if row.samples_ms else 1
        return dataclasses.replace(row, cpu=self.cpu, commit=self.commit, each=each)


def page(report: RequestReport, file: pathlib.Path) -> str:
    rows = [row for row in report.rows if row.samples_ms]
    about = ABOUT.format(counted=report.steps // BLOCK * BLOCK)
    versions = sorted({f"{row.system} {row.version}" for row in rows})
    parts = [
        *head(report, file, f"{report.cpu}, {report.cores} cores."),
        textwrap.fill(f"{about} {OF_ATTENTION}", 100),
        "\n".join(f"- {version}" for version in versions),
        *_origins(rows),
    ]
    for (model, cores), of_table in itertools.groupby(sorted(rows, key=_table), key=_table):
        parts += [f"## {model}, {_cores(cores)}", _rows(list(of_table))]
    if judged := goals(rows):
        parts += ["## Goals", judged]
    if missing := _missing(report):
        parts += ["## Not measured", *missing]
    return "\n\n".join(parts)


def _origins(rows: list[RequestRow]) -> list[str]:
    """Return a sentence if rows are of several commits, and one for rows of an older method."""
    commits = [row.commit for row in rows]
    parts = []
    if len(set(commits)) > 1:
        counted = (f"{commit}: {commits.count(commit)}" for commit in dict.fromkeys(commits))
        parts.append(f"Rows by commit: {', '.join(counted)}.")
    for system in dict.fromkeys(row.system for row in rows if not row.current):
        said = (
            f"Rows of {system} were measured in an older way, and not again yet: {OLDER[system]}."
        )
        parts.append(textwrap.fill(said, 100))
    return parts


def _missing(report: RequestReport) -> list[str]:
    """Return a line for each reason: the tables' prompts, and their ways if some were measured."""
    ways: dict[str, dict[str, list[str]]] = {}
    for row in report.rows:
        if row.skipped:
            prompt = f"{row.model}, {_cores(row.cores)}, {row.prompt} tokens"
            ways.setdefault(row.skipped, {}).setdefault(prompt, []).append(
                f"{row.system} {row.way}"
            )
    measured = {(row.model, row.cores, row.prompt) for row in report.rows if row.samples_ms}
    some = {f"{model}, {_cores(cores)}, {prompt} tokens" for model, cores, prompt in measured}
    return [
        f"- {reason}: "
        + "; ".join(f"{p} ({', '.join(names)})" if p in some else p for p, names in prompts.items())
        for reason, prompts in ways.items()
    ]


def _rows(rows: list[RequestRow]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row.way.startswith(ATTENTION), row.prompt)):
        lines.append(
            (
                str(row.prompt),
                f"{row.system}, {row.way}",
                f"{row.first_ms:.1f}",
                f"{1e3 * row.prompt / row.first_ms:.0f}",
                f"{row.step_ms:.2f}",
                f"{1e3 / row.step_ms:.1f}",
                f"{row.peak_bytes / 1e6:.0f}",
            )
        )
    names = ("prompt", "way", "first token, ms", "prompt tokens/s", "ms a token")
    return table((*names, "tokens/s", "peak MB"), lines)


def _table(row: RequestRow) -> tuple[str, int]:
    return row.model, row.cores


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"
