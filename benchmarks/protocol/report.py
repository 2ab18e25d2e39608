"""The report of the protocol: its rows, and the texts and sizes that they were measured with."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.protocol import large_models, made_plans
from benchmarks.protocol.caches import EXACT
from benchmarks.report_file import Report
from kvq_tools.evaluation.intervals import Estimate
from kvq_tools.evaluation.protocol import Measured, Reading, Sizes

MORE = 1.1  # times the exact tokens of most caches


@dataclasses.dataclass(frozen=True)
class Text:
    """A text: its domain, its file's name, its contents' hash and its tokens."""

    domain: str
    name: str
    sha256: str
    tokens: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One cache at one length in one reading.

    Args:
        cache: the method as the list names it.
        spec: the cache as it was measured.
        own_windows: True if the windows are the paper's, not the protocol's.
        exact_share: mean share of exact tokens among those that a scored one reads.
        model_bytes: resident bytes for the model measured, one sequence, bfloat16.
        calibrated: True if the method learned from the calibration text.
        seconds: processor seconds of all threads.
        processor: which measured it, or "" in files that are older than this field.
        commit: the state of the code that measured it.
    """

    cache: str
    spec: str
    own_windows: bool
    context: int
    reading: Reading
    exact_share: float
    model_bytes: int
    calibrated: bool
    measured: Measured
    seconds: float
    commit: str
    processor: str = ""

    @property
    def of_layers(self) -> bool:
        """True for a plan, whose widths are of the layers of the model measured."""
        return made_plans.MARK in self.cache

    @property
    def key(self) -> tuple[str, bool, int, Reading]:
        return self.cache, self.own_windows, self.context, self.reading


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtocolReport(Report):
    """Rows so far.

    Args:
        calibration_text: what calibration learned from; the headline is over the windows of texts
            of other domains.
        large_model: the model whose resident bytes stand beside a row's divergence.
        elsewhere: rows of `rows`, measured once more on another kind of processor.
    """

    model: str
    fingerprint: str
    texts: tuple[Text, ...]
    calibration_text: Text | None
    scored: int
    windows: int
    large_model: str = llama_8b.NAME
    rows: tuple[Row, ...] = ()
    elsewhere: tuple[Row, ...] = ()

    def sizes(self, context: int) -> Sizes:
        return Sizes(context, self.scored, self.windows)

    def large(self, row: Row) -> tuple[kvq.size.Size, ...]:
        """Return the sizes of a row's cache for the large model, for each of COMPARED_BATCHES.
        ValueError for the widths of a plan, which are of the layers of the model measured."""
        if row.of_layers:
            raise ValueError(f"{row.cache} has widths for the layers of {self.model} alone")
        return large_models.sizes(row.spec, self.large_model)

    def by_size(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows from the smallest to the largest cache of the large model, plans last."""
        chosen = list(rows)
        plans = [row for row in chosen if row.of_layers]
        others = [row for row in chosen if not row.of_layers]
        others.sort(key=lambda row: self.large(row)[0].resident)
        return others + sorted(plans, key=lambda row: row.model_bytes)

    @property
    def domains(self) -> Mapping[str, Sequence[int]]:
        """Return the windows of each domain."""
        return {
            text.domain: range(i * self.windows, (i + 1) * self.windows)
            for i, text in enumerate(self.texts)
        }

    @property
    def outside(self) -> list[Text]:
        """Return the texts of other domains than the calibration's, or all if there are no
        others."""
        learned = self.calibration_text and self.calibration_text.domain
        return [text for text in self.texts if text.domain != learned] or list(self.texts)

    @property
    def headline(self) -> list[int]:
        """Return the windows of the texts `outside`."""
        outside = self.outside
        return [
            i * self.windows + window
            for i, text in enumerate(self.texts)
            if text in outside
            for window in range(self.windows)
        ]

    def find(self, cache: str, context: int, reading: str, own_windows: bool = False) -> Row | None:
        """Return one row, or None if it was not measured."""
        key = (cache, own_windows, context, reading)
        return next((row for row in self.rows if row.key == key), None)

    def row(self, cache: str, context: int, reading: str, own_windows: bool = False) -> Row:
        """Return one row. Raises ValueError if it was not measured."""
        row = self.find(cache, context, reading, own_windows)
        if row is None:
            raise ValueError(f"{self.title} has no row {(cache, own_windows, context, reading)}")
        return row

    def quantized(self, context: int, reading: str) -> list[Row]:
        """Return the rows of one length and reading in the protocol's windows, without the exact
        cache."""
        return [
            row
            for row in self.rows
            if (row.context, row.reading, row.own_windows) == (context, reading, False)
            and row.cache != EXACT
        ]

    def of_another_processor(self, row: Row) -> bool:
        """Return True if another kind of processor measured most of the rows that name theirs."""
        counts = collections.Counter(one.processor for one in self.rows if one.processor)
        usual = [name for name, _ in counts.most_common(1)] or [row.processor]
        return bool(row.processor) and row.processor not in usual

    def keeps_more(self, row: Row) -> bool:
        """Return True if a row keeps more tokens exact than most caches do at its length, because
        its blocks are longer."""
        alike = [one.exact_share for one in self.quantized(row.context, row.reading)]
        return not row.own_windows and row.exact_share > MORE * statistics.median(alike)

    def marked(self, row: Row) -> str:
        """Return a row's cache with * if it learned from a text, † if another processor than that
        of most rows measured it, and ‡ if it keeps more tokens exact than most."""
        return f"{self.named(row)}{self.remark(row)}"

    def remark(self, row: Row) -> str:
        """Return the mark † of `marked`."""
        return "†" * self.of_another_processor(row)

    def named(self, row: Row) -> str:
        """Return a row's cache with the marks * and ‡ of `marked`."""
        return f"`{row.cache}`{'*' * row.calibrated}{'‡' * self.keeps_more(row)}"

    def kl(self, row: Row) -> Estimate:
        return row.measured.kl(self.headline)

    def ratio(self, row: Row, other: Row) -> Estimate:
        """Return the KL of a row over another's, paired over the windows of the headline. Texts are
        pooled, so a ratio that differs between them has a wide interval."""
        return row.measured.over(other.measured, self.headline)

    def ratio_by_text(self, row: Row, other: Row) -> dict[str, Estimate]:
        """Return the same ratio on each text of the headline alone, by its domain."""
        return {
            text.domain: row.measured.over(other.measured, self.domains[text.domain])
            for text in self.outside
        }
