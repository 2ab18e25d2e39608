"""Sides with tables, outliers and keys before RoPE."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.codecs.kernel_readers import codebook
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout
from tests.float64 import rotated
from tests.pallas_kernels.compiled import pack
from tests.pallas_kernels.harness import Shape, StoredSide

FACTOR = 1.25  # attention factor of the keys' RoPE
SINK = 5


@dataclasses.dataclass(frozen=True)
class CodebookSideFormat:
    """A stored format.

    Args:
        bits: of a code.
        scales: one per channel, fixed ("channels"); one per token over all heads ("token"); or one
            per token, head and group of so many channels.
        slots: for the outliers of a token, on average over its pool.
        pool: tokens that share slots.
        pre_rope: keys before RoPE.
        scale_dtype: of scales of tokens.
    """

    bits: int
    scales: Literal["channels", "token"] | int
    slots: int = 0
    pool: int = 32
    pre_rope: bool = False
    scale_dtype: str = "float16"


@dataclasses.dataclass(frozen=True)
class CodebookArrays:
    """Arrays of keys or values, and their meaning in float64: dense rows, the dense rows with
    shifted scales, and outliers, all [B, K, S, H] and before RoPE.
    """

    format: CodebookSideFormat
    reader: Reader
    arrays: list[np.ndarray]
    dense: np.ndarray
    shifted: np.ndarray
    outliers: np.ndarray
    frequencies: np.ndarray

    def rotated(
        self, rows: np.ndarray, moved: int = 0, tokens: np.ndarray | None = None
    ) -> np.ndarray:
        """Rotate keys to their positions plus `moved`. The rows are `tokens` of the body, or the
        first ones for None.
        """
        if not self.format.pre_rope:
            return rows
        tokens = np.arange(rows.shape[2]) if tokens is None else tokens
        angles = (SINK + moved + tokens)[:, None] * self.frequencies.astype(np.float64)
        return rotated(rows, angles, FACTOR)

    def side(self) -> StoredSide:
        rows = self.dense + self.outliers

        def misread() -> dict[str, np.ndarray]:
            wrong = {"with shifted scales": self.rotated(self.shifted + self.outliers)}
            if self.format.slots:
                wrong["without outliers"] = self.rotated(self.dense)
            if self.format.pre_rope:
                wrong["without a rotation"] = rows
                wrong["one position further"] = self.rotated(rows, moved=1)
            return wrong

        spoiled = functools.partial(_spoiled, self)
        return StoredSide(self.reader, self.arrays, self.rotated(rows), misread, spoiled)


def codebook_side(*args: Any, **options: Any) -> Callable[[Shape, int], StoredSide]:
    """Return what makes random sides of `CodebookSideFormat(*args, **options)`."""
    format = CodebookSideFormat(*args, **options)
    return lambda shape, seed: codebook_arrays(format, shape, seed).side()


def layout_of(format: CodebookSideFormat, head_dim: int) -> PlaneLayout:
    return plane_layout(format.bits, head_dim, 32)


def codebook_reader(format: CodebookSideFormat, head_dim: int, heads: int) -> Reader:
    group = None
    if format.scales == "token":
        group = ChannelGroup(heads, head_dim)
    elif isinstance(format.scales, int):
        group = ChannelGroup(1, format.scales)
    pool = format.pool if format.slots else 0
    reader = codebook(layout_of(format, head_dim), group, pool=pool, pre_rope=format.pre_rope)
    if isinstance(reader, RotatedReader):
        return dataclasses.replace(reader, sink=SINK)
    assert isinstance(reader, CodebookReader), reader
    return dataclasses.replace(reader, scale_dtype=format.scale_dtype)


def codebook_arrays(format: CodebookSideFormat, shape: Shape, seed: int) -> CodebookArrays:
    batch, heads, tokens, head_dim = shape
    rng, layout = np.random.default_rng(seed), layout_of(format, head_dim)
    codes = rng.integers(0, 1 << format.bits, shape)
    table = np.sort(rng.uniform(-1, 1, 1 << format.bits)).astype(np.float32)
    words = pack(jnp.asarray(codes, jnp.uint8), layout)
    arrays = [*map(np.asarray, words), table]
    ranges = ((0.5, 2.0), (-0.5, 0.5))
    if format.scales == "channels":
        scales = [rng.uniform(*r, (heads, head_dim)).astype(np.float32) for r in ranges]
        arrays += scales
        scale, zero = (s[None, :, None].astype(np.float64) for s in scales)
        shifted = np.roll(scale, 1, axis=3)
    else:
        shared = format.scales == "token"
        width = head_dim if shared else int(format.scales)
        of_tokens = (batch, 1 if shared else heads, head_dim // width, tokens)
        scales = [
            np.asarray(jnp.asarray(rng.uniform(*r, of_tokens), format.scale_dtype)) for r in ranges
        ]
        arrays += [s.view(np.uint16) if s.dtype.itemsize == 2 else s for s in scales]
        scale, zero = (
            np.repeat(np.swapaxes(s.astype(np.float64), 2, 3), width, axis=3) for s in scales
        )
        shifted = np.roll(scale, 1, axis=2)
    entries = table.astype(np.float64)[codes]
    outliers = np.zeros(shape)
    if format.slots:
        index, residual, ends, outliers = random_slots(rng, format.slots, format.pool, shape)
        arrays += [index, residual.view(np.uint16), ends]
    frequencies = (100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    if format.pre_rope:
        arrays += [frequencies, np.float32(FACTOR)]
    return CodebookArrays(
        format,
        codebook_reader(format, head_dim, heads),
        arrays,
        entries * scale + zero,
        entries * shifted + zero,
        outliers,
        frequencies,
    )


def random_slots(
    rng: np.random.Generator, count: int, pool: int, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return index, residual, ends, and the outliers as rows [B, K, S, H].

    Some pools are full, some are empty, and in some a single token or head has all slots.
    """
    batch, heads, tokens, channels = shape
    pools, places, size = tokens // pool, pool * channels, count * pool
    index = np.zeros((batch, pools, size), np.uint16)
    residual = np.zeros((batch, pools, size), np.float16)
    ends, outliers = np.zeros((batch, pools, heads), np.uint16), np.zeros(shape)
    for b, p in np.ndindex(batch, pools):
        crowd = rng.random((heads, pool, channels))
        crowd[rng.integers(heads), rng.integers(pool)] += rng.integers(2)
        crowd[rng.integers(heads)] += rng.random() < 0.2
        used = (0, size, int(rng.integers(size + 1)))[rng.integers(3)]
        place = np.sort(np.argsort(-crowd.ravel())[:used])
        index[b, p, :used], residual[b, p, :used] = place % places, rng.normal(size=used) * 4
        ends[b, p] = np.searchsorted(place, places * np.arange(1, heads + 1))
        k, t, h = np.unravel_index(place, (heads, pool, channels))
        outliers[b, k, p * pool + t, h] = residual[b, p, :used]
    return index, residual, ends, outliers


def _spoiled(stored: CodebookArrays, limits: Sequence[int], bits: int) -> list[np.ndarray]:
    """Overwrite words by ones, fp16 numbers by `bits`, and the outliers of pools by the same number
    for every head.
    """
    _, heads, tokens, channels = stored.dense.shape
    format, spoiled = stored.format, []
    sets, per_row = len(layout_of(format, channels).sets), tokens // stored.arrays[0].shape[2]
    last = len(stored.arrays) - 2 * format.pre_rope
    first_of_slots = last - 3 if format.slots else last
    for i, array in enumerate(stored.arrays):
        array = np.array(array)
        if i < sets:
            for b, limit in enumerate(limits):
                array[b, :, -(-limit // 32) * 32 // per_row :] = -1
        elif first_of_slots <= i < last:  # index, residual and ends
            garbage = (
                np.arange(array.shape[2]) * 7,
                bits,
                np.arange(1, heads + 1) * (format.slots * format.pool // heads),
            )[i - first_of_slots]
            for b, limit in enumerate(limits):
                array[b, -(-limit // format.pool) :] = garbage
        elif array.ndim > 2:  # a token's scales and zero points, [B, K, groups, S]
            for b, limit in enumerate(limits):
                array[b, ..., limit:] = bits
        spoiled.append(array)
    return spoiled
