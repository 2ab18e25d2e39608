"""The report of a run of faults, and its page."""

from __future__ import annotations

import dataclasses
import pathlib

from benchmarks.markdown import head, table
from benchmarks.report_file import Report


@dataclasses.dataclass(frozen=True)
class FaultRow:
    """One kind of fault. Of `tried` injections: `detected` were noticed, `recovered` of them were
    followed by the right answer; `other` gave the content of another valid file. control: bad
    outcomes of `controls` injections with the protection switched off, as `without` says."""

    kind: str
    tried: int = 0
    detected: int = 0
    recovered: int = 0
    other: int = 0
    wrong: int = 0
    crash: int = 0
    hang: int = 0
    controls: int = 0
    control: int = 0
    without: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SoakSample:
    """Resident bytes, open files and threads of the server after `seconds` and `answers`, of which
    `wrong` differ from the first one to the same request, and `failed` came to nothing."""

    seconds: float
    answers: int
    wrong: int
    failed: int
    resident_bytes: int
    files: int
    threads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultReport(Report):
    """The kinds, and the samples of a soak with `connections` at a time."""

    rows: tuple[FaultRow, ...]
    connections: int = 0
    soak: tuple[SoakSample, ...] = ()


HEAD = ("fault", "tried", "detected", "recovered", "wrong answers", "crashes", "hangs")
CONTROL = ("bad without protection", "which means")
SAID = (
    "An answer is right if its tokens and log-probabilities, or the bytes that were read, are those"
    " without the fault. Detected: kvq noticed the fault, and a file was refused in one line, or"
    " something was computed again. Recovered: the right answer came afterwards. Other injections"
    " had no effect. In the last columns, injections of the same kind, with what protects kvq"
    " switched off, show that a wrong answer, crash or hang would be seen."
)
SOAKED = (
    "A server of the embedded model, watched while clients come and go: resident memory, open files"
    " and threads must not grow. Wrong: another answer than the first one to the same request."
    " Failed: a request that was accepted and came to nothing, or a server's error."
)
OTHER = (
    "Another valid file: configurations, tokenizers, GGUF files, plans and prompts have no"
    " checksum, and damage that leaves one that can be read gives what that one says ({}). kvq's"
    " own models are pinned by the sha256 of each file."
)


ANY = (
    "Any bit of a live cache: also one in a row that is newer than its layer's last turn, which no"
    " sum covers yet, or that holds nothing. Sealed bits: of rows that the slot held a token ago."
)


def page(report: FaultReport, file: pathlib.Path) -> str:
    """Render the tables of the kinds and of the soak, whichever were run."""
    parts = head(report, file, SAID if report.rows else SOAKED)
    if report.rows:
        parts += _kinds(report)
    if report.soak:
        parts += ["## Soak", _soak(report)] if report.rows else [_soak(report)]
    return "\n\n".join(parts)


def _kinds(report: FaultReport) -> list[str]:
    lines = [
        (
            row.kind,
            *map(str, (row.tried, row.detected, row.recovered, row.wrong, row.crash, row.hang)),
            f"{row.control} of {row.controls}",
            row.without,
        )
        for row in report.rows
    ]
    names = ("tried", "detected", "recovered", "wrong", "crash", "hang")
    sums = [f"{sum(getattr(row, name) for row in report.rows)}" for name in names]
    lines.append(("**all**", *(f"**{value}**" for value in sums), "", ""))
    others = ", ".join(f"{row.kind} {row.other}" for row in report.rows if row.other)
    parts = [table((*HEAD, *CONTROL), lines)]
    if others:
        parts.append(OTHER.format(others))
    if any("any bit" in row.kind for row in report.rows):
        parts.append(ANY)
    return parts


def _soak(report: FaultReport) -> str:
    samples = [
        (
            f"{one.seconds / 60:.0f}",
            *map(str, (one.answers, one.wrong, one.failed)),
            f"{one.resident_bytes / 2**20:.0f}",
            *map(str, (one.files, one.threads)),
        )
        for one in report.soak
    ]
    names = ("minutes", "answers", "wrong", "failed", "resident MiB", "open files", "threads")
    said = f"{report.connections} connections at a time, mixed requests, vanishing clients."
    return f"{said}\n\n{table(names, samples)}"
