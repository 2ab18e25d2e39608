"""The report of a suite: rows, and what they were measured on."""

from __future__ import annotations

import dataclasses

from benchmarks.report_file import Report
from kvq_tools.evaluation.intervals import (
    Estimate,
    Interval,
    kl_interval,
    mean_interval,
    paired_ratio,
)
from kvq_tools.evaluation.results import exp
from laboratory.quality.comparison import PLAIN


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one cache on one variant of the model. Bits are of a body element.

    stored_bits: bits as stored.
    paper_bits: bits by the KVQuant paper's rule, or None if it has none for this cache.
    cache_bytes: bytes of one window, full-precision tokens included.
    nats, kl: means over the windows.
    dropped: share of each side's outliers without a slot, empty if there are none.
    window_nats, window_kl: mean of each window, in the text's order.
    commit: state of the code that measured it.
    """

    stored_bits: float
    paper_bits: float | None
    outlier_fraction: float
    cache_bytes: int
    tokens: int
    nats: float
    kl: float
    agreement: float
    dropped: dict[str, float] = dataclasses.field(default_factory=dict)
    window_nats: tuple[float, ...] = ()
    window_kl: tuple[float, ...] = ()
    commit: str = ""

    @property
    def perplexity(self) -> float:
        return exp(self.nats)

    @property
    def kl_interval(self) -> Interval:
        return kl_interval(self.window_kl)

    @property
    def perplexity_interval(self) -> Interval:
        return Interval(*map(exp, mean_interval(self.window_nats)))

    def kl_ratio(self, other: Measured) -> Estimate:
        """Return the mean ratio of this KL to another cache's on the same windows."""
        return paired_ratio(self.window_kl, other.window_kl)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityRow(Measured):
    """The numbers of one cache, with its place in a table. fake: every token was quantized, in one
    pass without a cache."""

    table: str
    cells: tuple[str, ...]
    column: str
    cache: str
    other_text: bool
    variant: str
    fake: bool = False


@dataclasses.dataclass(frozen=True)
class Text:
    """A text by name and contents, and how many tokens of it there are."""

    name: str
    sha256: str
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityReport(Report):
    """Rows and what they were measured on.

    heads: name the cells of each table's lines.
    against: cells of the line that the others of a table are compared with.
    """

    model: str
    windows: int = 0
    window: int
    prompt: int
    samples: int
    sample_length: int
    text: Text
    calibration_text: Text
    other_calibration_text: Text | None
    heads: dict[str, tuple[str, ...]]
    against: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    rows: tuple[QualityRow, ...]

    def of(self, table: str, *, fake: bool = False) -> list[QualityRow]:
        return [row for row in self.rows if row.table == table and row.fake == fake]

    def commits(self) -> list[str]:
        return sorted({row.commit for row in self.rows if row.commit})

    def variants(self, table: str) -> list[str]:
        return list(dict.fromkeys(row.variant for row in self.of(table))) or [PLAIN]
