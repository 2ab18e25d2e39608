"""The rows of the GPU benchmarks, and the report that keeps them on disk while they are
measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.trace import KernelTime
from benchmarks.report_file import DERIVED, Report, header, now

INEXACT_MERGE = "jax.nn rounds the sums' logarithms to bf16: merged inexactly"
# of packed rows: fp16 queries, weights and rows err by 2e-3 at most if they are interpreted
# (docs/kernels.md)
MAX_ERROR = 5e-3
MOST_ERROR_BF16 = 2e-2  # of bfloat16 rows, whose weights are rounded to bfloat16
MAX_ERROR_INEXACT = 6e-2  # of sums whose logarithms are bfloat16
MAX_ERROR_OF_LOGITS = 4e-2  # of a model in bfloat16, whose roundings differ from layer to layer
MAX_ERROR_OF_CODES = 1e-2  # of quantized rows: single codes may differ at ties


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One candidate at one shape. Times are of one call (device_timing.py), or of one decode step.

    section: attention, quantize, bandwidth, step or parity (of many small steps), in the laboratory
        also scores (q . K^T), values (p . V), kvquant keys, kvquant values, polarquant keys.
    model: the model that has this shape.
    arithmetic: arithmetic of our kernels, "" for other code.
    bf16: keys and values are not quantized.
    moved_bytes: the least that a call must move.
    cold: the copies that calls take in turn exceed the L2 twofold.
    idle_ms: median of the same program over no live token (launches and the merge), or None if a
        program has no such input.
    error: largest relative error of an output row against the reference on the same codes, or None
        if it was not measured.
    remark: tells readers about a limitation of the time or the error.
    failure: one line, if a time or an error that should be there is missing.
    """

    section: str
    model: str
    shape: Shape
    candidate: str
    arithmetic: str = ""
    bf16: bool = False
    moved_bytes: int = 0
    copies: int = 0
    cold: bool = False
    date: str = dataclasses.field(default_factory=now)
    samples_ms: tuple[float, ...] = ()
    idle_ms: float | None = None
    error: float | None = None
    remark: str = ""
    failure: str = ""

    @property
    def mostly_launches(self) -> bool:
        """Return True if the same launches without any token take more than half of the time."""
        return (
            self.idle_ms is not None
            and bool(self.samples_ms)
            and self.idle_ms > 0.5 * self.median_ms
        )

    @property
    def max_error(self) -> float:
        """Return the largest error that rounding explains."""
        if self.section in ("step", "parity"):
            return MAX_ERROR_OF_LOGITS
        if self.section == "quantize":
            return MAX_ERROR_OF_CODES
        return (
            MAX_ERROR_INEXACT
            if self.remark == INEXACT_MERGE
            else MOST_ERROR_BF16
            if self.bf16
            else MAX_ERROR
        )

    @property
    def wrong(self) -> str:
        """Say in one line what is wrong with a row, or "" if nothing is.

        Wrong is an error that rounding does not explain, or a kernel of ours that failed. A row
        that was left out has no error.
        """
        if self.error is not None and not self.error <= self.max_error:
            return f"error {self.error:.1e}, at most {self.max_error:.0e} is rounding"
        return self.failure if self.arithmetic or self.section == "parity" else ""

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms)) if self.samples_ms else float("nan")

    @property
    def rate(self) -> float:
        """Return the bytes that must be moved over the median time, in bytes a second."""
        return self.moved_bytes / (self.median_ms * 1e-3)

    @property
    def name(self) -> str:
        return f"{self.candidate} ({self.arithmetic})" if self.arithmetic else self.candidate

    @property
    def place(self) -> tuple[str, str, Shape]:
        return self.section, self.model, self.shape

    @property
    def key(self) -> tuple[str, str, Shape, str]:
        return *self.place, self.candidate

    @property
    def case(self) -> tuple[str, str, Shape, str, str]:
        """Return what no two rows share: the key, and the arithmetic."""
        return *self.key, self.arithmetic


@dataclasses.dataclass(frozen=True)
class Trace:
    """The kernels that ran in `calls` calls of a program, as the profiler saw them. what: the
    program."""

    what: str
    calls: int
    kernels: tuple[KernelTime, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuReport(Report):
    """Rows so far. skipped: cases for which no time was left. traces: of a few programs. running:
    empty rows of what is being compiled or timed now, so that a file which a crash left behind
    names its cause. The lists grow while it is measured.
    """

    rows: list[KernelRow] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    traces: list[Trace] = dataclasses.field(default_factory=list)
    running: list[KernelRow] = dataclasses.field(default_factory=list)

    @classmethod
    def here(cls, title: str, command: Sequence[str]) -> GpuReport:
        """Return an empty report of this process's first device."""
        return cls(title=title, **header(command))

    def resumed(self, earlier: GpuReport) -> GpuReport:
        """Return the earlier report, to go on with here. Raises ValueError if it was begun on
        another device or version."""
        for name in ("title", "device", "jax_version"):
            if getattr(self, name) != getattr(earlier, name):
                raise ValueError(
                    f"cannot resume: {name} was {getattr(earlier, name)!r} and is"
                    f" {getattr(self, name)!r}"
                )
        return earlier

    def wrong(self) -> list[str]:
        """Name each row with something wrong, and say what."""
        return [
            f"{row.section}, {row.model}, {row.shape.tokens} tokens x {row.shape.batch},"
            f" {row.name}: {row.wrong}"
            for row in self.rows
            if row.wrong
        ]

    def median_rate(self, name: str) -> float | None:
        """Return the bytes a second of the measured "copy" or "read"."""
        rates = [
            row.rate
            for row in self.rows
            if row.section == "bandwidth" and row.candidate == name and row.samples_ms
        ]
        return rates[-1] if rates else None

    def share(self, row: KernelRow) -> float | None:
        """Return the share of the measured copy bandwidth that a row reaches."""
        copy = self.median_rate("copy")
        return row.rate / copy if copy and row.samples_ms and row.moved_bytes else None

    def best_bf16(self, row: KernelRow) -> KernelRow | None:
        """Return the fastest candidate at this row's place that does not quantize."""
        candidates = [
            other
            for other in self.rows
            if other.place == row.place and other.bf16 and other.samples_ms
        ]
        return min(candidates, key=lambda other: other.median_ms, default=None)

    def ratio(self, row: KernelRow) -> float | None:
        """Return the median time divided by the best bf16 candidate's. They were timed one after
        the other, not in turn."""
        best = self.best_bf16(row)
        return row.median_ms / best.median_ms if best and row.samples_ms else None

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            name: [self._row_json(row) for row in getattr(self, name)]
            for name in ("rows", "running")
        }

    def _row_json(self, row: KernelRow) -> dict[str, Any]:
        derived = {
            "median_ms": row.median_ms if row.samples_ms else None,
            "gb_per_s": round(row.rate / 1e9, 1) if row.samples_ms else None,
            "share_of_copy_bandwidth": self.share(row),
            "time_over_best_bf16": self.ratio(row),
        }
        return dataclasses.asdict(row) | {DERIVED: derived}


def one_line(error: BaseException) -> str:
    """Render an error as a cell of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300].replace("|", "/")


def is_fatal(failure: str) -> bool:
    """Return True if an error leaves the process's GPU unusable, so that only a new process can go
    on."""
    return "RESOURCE_EXHAUSTED" not in failure and any(
        text in failure for text in ("CUDA_ERROR", "illegal memory", "ILLEGAL_ADDRESS")
    )
