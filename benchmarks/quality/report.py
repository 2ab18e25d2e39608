"""The report of a suite: rows, and what they were measured on."""

from __future__ import annotations

import dataclasses
import math

from benchmarks.quality.comparison import PLAIN
from benchmarks.report_file import Report


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one cache on one variant of the model. Bits are of a body element: as stored, and by the KVQuant paper's rule (None
    where it says nothing). cache_bytes are those of one window, exact tokens included."""

    stored_bits: float
    paper_bits: float | None
    outlier_fraction: float
    cache_bytes: int
    tokens: int
    nats: float
    kl: float
    agreement: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


@dataclasses.dataclass(frozen=True)
class QualityRow(Measured):
    """The numbers of one cache, with its place in a table."""

    table: str
    cells: tuple[str, ...]
    column: str
    cache: str
    other_text: bool
    variant: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A text by name and contents, and how many tokens of it there are."""

    name: str
    sha256: str
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityReport(Report):
    """Rows and what they were measured on. heads name the cells of each table's lines."""

    model: str
    window: int
    prompt: int
    samples: int
    sample_length: int
    text: Text
    calibration_text: Text
    other_calibration_text: Text
    heads: dict[str, tuple[str, ...]]
    rows: tuple[QualityRow, ...]

    def of(self, table: str) -> list[QualityRow]:
        return [row for row in self.rows if row.table == table]

    def variants(self, table: str) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.of(table))) or [PLAIN]
