"""Markdown of the result pages."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence

from benchmarks.report_file import Report

END = "<!-- end of what was made -->"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Render a GitHub table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def replaced(page: str, begin: str, text: str) -> str:
    """Return the page with `text` between the comments `begin` and END. Raises ValueError if one is
    missing."""
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(END)
    if not first or not last:
        raise ValueError(f"the page lacks {begin!r} or, after it, {END!r}")
    return f"{before}{begin}\n\n{text}\n\n{END}{after}"


def head(report: Report, file: pathlib.Path, *said: str) -> list[str]:
    """Render a page's title, and the paragraph that tells what made its numbers and in which file
    they lie."""
    versions = [
        f"JAX {report.jax_version}",
        *([f"Python {report.python_version}"] if report.python_version else []),
    ]
    changed = " with changes that are in no commit" if report.commit.endswith("+") else ""
    versions += [f"commit {report.commit.rstrip('+')}{changed}"] if report.commit else []
    origin = (
        f"`{report.command}` on {report.date}{report.device and f', device {report.device}'};"
        f" {', '.join(versions)}."
    )
    return [
        f"# {report.title}",
        " ".join([origin, *said, f"Raw numbers: [{file.name}]({file.name})."]),
    ]


def bracket(interval: tuple[float, float], format: str) -> str:
    """Render an interval after its mean, or nothing if there is none."""
    low, high = interval
    sign, rest = (format[:1], format[1:]) if format.startswith("+") else ("", format)
    format = f"{sign}z{rest}"  # no -0
    return "" if math.isnan(low) else f" [{low:{format}}, {high:{format}}]"


def with_interval(value: float, interval: tuple[float, float], format: str) -> str:
    """Render a number and its interval, or the number alone if there is none."""
    return f"{value:{format}}{bracket(interval, format)}"
