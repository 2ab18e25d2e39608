"""The report of long-context tasks: scores of every sample, and their page."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from benchmarks.markdown import head, table, with_interval
from benchmarks.report_file import Report
from kvq_tools.evaluation.intervals import Interval
from laboratory.quality.intervals import gap_interval, share_interval
from laboratory.quality.report import Text

FULL_PRECISION = "dense"
WORDS = {  # of the tasks, beside RULER's names for those with needles
    "passkey": "five digits between dull sentences",
    "vt": "variable tracking",
    "cwe": "common words",
    "fwe": "frequent words",
    "quote": "a passage word by word, less its character errors",
    "tool_call": "a call in JSON, valid against its schema",
}


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """A cache by its spec, and its stored bits for each body element."""

    cache: str
    stored_bits: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """The scores of one cache in one task at one length, each between 0 and 1, in the order of the
    samples: the same for every cache."""

    cache: str
    task: str
    length: int
    scores: tuple[float, ...]
    commit: str = ""

    @property
    def accuracy(self) -> float:
        return _mean(self.scores)

    @property
    def interval(self) -> Interval:
        return share_interval(self.scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongContextReport(Report):
    """Scores and what was asked. Where full precision is below the threshold, there are cells of
    full precision alone. new_tokens: the longest answer of each task; calibration_text: None if no
    cache is calibrated. through: tokens of a prompt that are decoded. choosing: other samples by
    which tasks are chosen, or 0 for the same."""

    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    caches: tuple[CacheSize, ...]
    count: int
    threshold: float
    chat: bool
    new_tokens: dict[str, int]
    text: Text | None
    calibration_text: Text | None
    samples: int
    sample_length: int
    cells: tuple[Cell, ...]
    through: int = 0
    choosing: int = 0

    def cells_of(self, cache: str, length: int) -> dict[str, Cell]:
        """Return the cells of a cache at one length by their tasks."""
        return {
            cell.task: cell for cell in self.cells if (cell.cache, cell.length) == (cache, length)
        }

    def asked_of_all(self, length: int) -> list[str]:
        """Return the tasks at this length that every cache was asked."""
        asked = [self.cells_of(cache.cache, length) for cache in self.caches]
        return [task for task in asked[0] if all(task in cells for cells in asked)]

    def scores(self, cache: str, length: int) -> list[float]:
        """Return the scores of all samples of the tasks that were asked of all caches."""
        cells = self.cells_of(cache, length)
        return [score for task in self.asked_of_all(length) for score in cells[task].scores]


def page(report: LongContextReport, file: pathlib.Path) -> str:
    """Render the means of the tasks by length, and a table of tasks for each length."""
    parts = [
        *head(report, file, *_said(report)),
        "## Mean of the tasks that full precision can do",
        _means(report),
    ]
    for length in report.lengths:
        parts += [f"## {length} tokens", _tasks(report, length)]
    return "\n\n".join(parts)


def _said(report: LongContextReport) -> list[str]:
    limits = ", ".join(f"{task} {new}" for task, new in report.new_tokens.items())
    commits = sorted({cell.commit for cell in report.cells if cell.commit})
    named = "; ".join(f"{task}: {WORDS[task]}" for task in report.tasks if task in WORDS)
    ours = "passkey, quote and tool_call" if "quote" in report.tasks else "passkey"
    other = f" on {report.choosing} other samples" if report.choosing else ""
    said = [
        (
            f"Model: {report.model}{', prompts in its chat template' if report.chat else ''}. Cells"
            f" are percent of what was asked for that the greedy answer says, over {report.count}"
            f" samples, the same for every cache. {_reading(report)} Brackets hold 95 % intervals"
            " of Clopper and Pearson over the samples (of all tasks for a mean), and for a"
            " difference to full precision the same of its gains and of its losses. If full"
            f" precision itself is below {100 * report.threshold:g} %{other}, no other cache was"
            " asked. A length counts prompt and answer."
        ),
        (
            f"The tasks are RULER's but for {ours}{f' ({named})' if named else ''}; the longest"
            f" answers in tokens: {limits}."
        ),
    ]
    if report.text is not None:
        said.append(f"Needles are hidden in {report.text.name}.")
    if report.calibration_text is not None:
        said.append(
            f"Caches that learn are calibrated on {report.samples} samples of"
            f" {report.sample_length} tokens of {report.calibration_text.name}."
        )
    return [*said, *([f"Code: {', '.join(commits)}."] if commits else [])]


def _reading(report: LongContextReport) -> str:
    if report.through:
        return (
            f"The last {report.through} tokens of a prompt are decoded, so the question and the"
            " first token of its answer are read through the cache."
        )
    return (
        "The prompt, question included, attends to itself exactly, so the first token of an answer"
        " does not depend on the cache; all later ones are read through it."
    )


def _means(report: LongContextReport) -> str:
    """Render a line for each cache: its mean at every length, and how many points it is away from
    full precision's on the same samples."""
    lengths = [length for length in report.lengths if report.asked_of_all(length)]
    heads = [
        title
        for length in lengths
        for title in (
            f"{length} tokens ({len(report.asked_of_all(length))} tasks)",
            "to full precision",
        )
    ]
    lines = []
    for size in report.caches:
        cells = []
        for length in lengths:
            scores, exact = report.scores(size.cache, length), report.scores(FULL_PRECISION, length)
            gap = _in_percent(_mean(scores) - _mean(exact), gap_interval(scores, exact), "+.0f")
            cells += [_percent(scores), "" if size.cache == FULL_PRECISION else gap]
        lines.append((*_names(size), *cells))
    return table(("cache", "stored bits", *heads), lines)


def _tasks(report: LongContextReport, length: int) -> str:
    lines = []
    for size in report.caches:
        cells = report.cells_of(size.cache, length)
        lines.append(
            (
                *_names(size),
                *(_percent(cells[task].scores) if task in cells else "" for task in report.tasks),
            )
        )
    return table(("cache", "stored bits", *report.tasks), lines)


def _names(size: CacheSize) -> tuple[str, str]:
    return f"`{size.cache}`", f"{size.stored_bits:.2f}"


def _percent(scores: Sequence[float]) -> str:
    return _in_percent(_mean(scores), share_interval(scores), ".0f")


def _in_percent(value: float, interval: Interval, format: str) -> str:
    low, high = interval
    return with_interval(100 * value, (100 * low, 100 * high), format)


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
