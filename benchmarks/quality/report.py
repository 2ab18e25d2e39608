"""What a run writes: rows, and what they were measured on."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

from benchmarks.quality.comparison import PLAIN


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one cache of one variant of the model came to. Bits are of a body element: as stored, and by the KVQuant paper's rule (None
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
    """With its place in a table."""

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


@dataclasses.dataclass(frozen=True)
class QualityReport:
    """Rows and what they were measured on. heads name the cells of each table's lines."""

    title: str
    command: str
    date: str
    model: str
    jax_version: str
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

    def write(self, file: pathlib.Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: pathlib.Path) -> QualityReport:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        texts = {name: Text(**fields[name]) for name in ("text", "calibration_text", "other_calibration_text")}
        rows = tuple(QualityRow(**{**row, "cells": tuple(row["cells"])}) for row in fields["rows"])
        heads = {table: tuple(found) for table, found in fields["heads"].items()}
        return cls(**{**fields, **texts, "heads": heads, "rows": rows})
