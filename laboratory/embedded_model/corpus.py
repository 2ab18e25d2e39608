"""From text files to token rows: documents, a held-out split, one long token stream, and the rows
of each training step.

A row is END_OF_TEXT followed by `length` tokens: position 0 holds the same token in training and in
use, and the others are the targets. Rows are a pure function of (seed, step): a resumed run reads
exactly what an uninterrupted run would have read.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer

from laboratory.embedded_model.synthetic import SyntheticRows
from laboratory.embedded_model.tokenizer import END_ID, END_OF_TEXT

WINDOW = 2048  # the stream is shuffled in windows of this many tokens; row lengths divide it
HELD_OUT_ONE_IN = 100
SYNTHETIC_ONE_IN = 4

TokenArray: TypeAlias = np.ndarray


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum: `steps` steps on rows of `length` tokens."""

    length: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """tokens [R, length + 1] int32; weights [R, length] fp32, the loss weight of each target."""

    tokens: np.ndarray
    weights: np.ndarray


def parse_curriculum(text: str) -> tuple[Phase, ...]:
    """Parse a curriculum: '256:800,1024:400' is 800 steps on rows of 256 tokens, then 400 on rows
    of 1024. Lengths must divide WINDOW."""
    phases = []
    for item in text.split(","):
        length, separator, steps = item.partition(":")
        if not (separator and length.isdigit() and steps.isdigit()):
            raise ValueError(f"curriculum {item=}: expected LENGTH:STEPS, for example 256:800")
        if int(length) == 0 or WINDOW % int(length):
            raise ValueError(f"curriculum {length=}: row lengths must divide {WINDOW}")
        phases.append(Phase(int(length), int(steps)))
    return tuple(phases)


def read_documents(directory: Path) -> list[str]:
    """Return all documents in the *.txt files of a directory; a line END_OF_TEXT ends a
    document."""
    files = sorted(directory.glob("*.txt"))
    if not files:
        raise ValueError(f"corpus {str(directory)!r} has no .txt files")
    texts = (file.read_text(encoding="utf-8") for file in files)
    documents = (
        document.strip("\n") for text in texts for document in text.split(f"\n{END_OF_TEXT}\n")
    )
    return [document for document in documents if document]


def split_documents(
    documents: Sequence[str], one_in: int = HELD_OUT_ONE_IN
) -> tuple[list[str], list[str]]:
    """Return (train, held out): a checksum of its text, not its place in the list, decides whether
    a document is held out."""
    held_out = [zlib.crc32(document.encode()) % one_in == 0 for document in documents]
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    return train, [document for document, out in zip(documents, held_out, strict=True) if out]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> TokenArray:
    """Return one stream [tokens] uint16: every document followed by END_OF_TEXT."""
    end = np.array([END_ID], np.uint16)
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 64):
        for encoding in tokenizer.encode_batch(
            documents[start : start + 64], add_special_tokens=False
        ):
            parts += [np.array(encoding.ids, np.uint16), end]
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class RowSource:
    """The rows of every step: one in SYNTHETIC_ONE_IN is synthetic, the others walk once through
    the shuffled windows of the stream."""

    stream: TokenArray
    synthetic: SyntheticRows
    curriculum: tuple[Phase, ...]
    tokens_per_step: int
    seed: int

    def phase_at(self, step: int) -> tuple[Phase, int, int]:
        """Return (phase, step within the phase, real tokens consumed before the phase) for a global
        step."""
        consumed = 0
        for phase in self.curriculum:
            if step < phase.steps:
                return phase, step, consumed
            step -= phase.steps
            rows = self.rows_per_step(phase) * phase.steps
            consumed += -(-_real_rows(rows) * phase.length // WINDOW) * WINDOW
        raise ValueError(
            f"{step=} is {step + 1} steps past the end of the curriculum {self.curriculum}"
        )

    def rows_per_step(self, phase: Phase) -> int:
        return max(1, self.tokens_per_step // phase.length)

    def batch(self, step: int) -> Batch:
        phase, local_step, consumed = self.phase_at(step)
        rows = self.rows_per_step(phase)
        first_row = local_step * rows
        made = [
            self._row(phase.length, row, step, consumed)
            for row in range(first_row, first_row + rows)
        ]
        return Batch(
            np.stack([tokens for tokens, _ in made]).astype(np.int32),
            np.stack([weights for _, weights in made]),
        )

    def _row(
        self, length: int, row: int, step: int, consumed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if row % SYNTHETIC_ONE_IN == SYNTHETIC_ONE_IN - 1:
            return self.synthetic.row(length, np.random.default_rng((self.seed, step, row)))
        position = consumed + _real_rows(row) * length
        windows = len(self.stream) // WINDOW
        epoch, window = divmod(position // WINDOW, windows)
        order = np.random.default_rng((self.seed, epoch)).permutation(windows)
        start = order[window] * WINDOW + position % WINDOW
        return opened(self.stream[start : start + length]), np.ones(length, np.float32)


def _real_rows(rows: int) -> int:
    """Count the rows of real text among the first `rows` rows of a phase."""
    return rows - rows // SYNTHETIC_ONE_IN


def opened(tokens: TokenArray) -> TokenArray:
    """Return the tokens with END_OF_TEXT before them, as it opens every row."""
    return np.concatenate([np.array([END_ID], tokens.dtype), tokens])


def evaluation_rows(stream: TokenArray, length: int, limit: int | None = None) -> np.ndarray:
    """Return [rows, length + 1] int32: consecutive windows of the stream, each opened by
    END_OF_TEXT; a shorter tail is dropped."""
    count = len(stream) // length if limit is None else min(limit, len(stream) // length)
    if count == 0:
        raise ValueError(f"{len(stream)=} tokens are fewer than one row of {length=}")
    windows = stream[: count * length].reshape(count, length)
    return np.concatenate([np.full((count, 1), END_ID), windows], axis=1).astype(np.int32)
