"""Sides with tables, outliers and keys before RoPE: what a cache stores of them, and the rows that
it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.packing import pack
from kvq_jax.codecs.kernel_readers import nonuniform
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.tiles.layout import PlaneLayout, plane_layout

FACTOR = 1.25  # attention factor of the keys' RoPE


@dataclasses.dataclass(frozen=True)
class Format:
    """A stored format. scales: of channels, fixed; of a token over all heads; or of so many
    channels of a token and head. slots: for the outliers of a token, in the mean over the `pool`
    tokens that share them."""

    bits: int
    scales: Literal["channels", "token"] | int
    slots: int = 0
    pool: int = 32
    pre_rope: bool = False


@dataclasses.dataclass(frozen=True)
class Stored:
    """Arrays of keys or values as a reader takes them, and their meaning in float64: dense rows and
    outliers [B, K, S, H], before RoPE."""

    format: Format
    reader: Reader
    arrays: list[np.ndarray]
    dense: np.ndarray
    outliers: np.ndarray
    frequencies: np.ndarray
    sink: int

    def rows(
        self,
        *,
        outliers: bool = True,
        rotated: bool = True,
        moved: int = 0,
        tokens: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return what the arrays stand for; `tokens`: of the body, those that they hold (default:
        the first)."""
        found = self.dense + self.outliers if outliers else self.dense
        if not (self.format.pre_rope and rotated):
            return found
        tokens = np.arange(found.shape[2]) if tokens is None else tokens
        angles = (self.sink + moved + tokens)[:, None] * self.frequencies.astype(np.float64)
        first, second = np.split(found, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return FACTOR * np.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        )


def reader_of(format: Format, head_dim: int, heads: int, sink: int) -> Reader:
    group = None
    if format.scales == "token":
        group = ChannelGroup(heads, head_dim)
    elif isinstance(format.scales, int):
        group = ChannelGroup(1, format.scales)
    pool = format.pool if format.slots else 0
    reader = nonuniform(layout_of(format, head_dim), group, pool=pool, pre_rope=format.pre_rope)
    assert isinstance(reader, Reader), reader
    return dataclasses.replace(reader, sink=sink) if isinstance(reader, RotatedReader) else reader


def layout_of(format: Format, head_dim: int) -> PlaneLayout:
    return plane_layout(format.bits, head_dim, 32)


def stored(
    format: Format, head_dim: int, batch: int, heads: int, tokens: int, seed: int, sink: int = 5
) -> Stored:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << format.bits, (batch, heads, tokens, head_dim))
    table = np.sort(rng.uniform(-1, 1, 1 << format.bits)).astype(np.float32)
    arrays = [
        *(np.asarray(w) for w in pack(jnp.asarray(codes, jnp.uint8), layout_of(format, head_dim))),
        table,
    ]
    if format.scales == "channels":
        scale, zero = (
            rng.uniform(*r, (heads, head_dim)).astype(np.float32) for r in ((0.5, 2.0), (-0.5, 0.5))
        )
        arrays += [scale, zero]
        scale, zero = (s[None, :, None] for s in (scale, zero))
    else:
        shared = format.scales == "token"
        width = head_dim if shared else int(format.scales)
        shape = (batch, 1 if shared else heads, head_dim // width, tokens)
        halves = [rng.uniform(*r, shape).astype(np.float16) for r in ((0.5, 2.0), (-0.5, 0.5))]
        arrays += [h.view(np.uint16) for h in halves]
        scale, zero = (
            np.repeat(np.swapaxes(h.astype(np.float64), 2, 3), width, axis=3) for h in halves
        )
    dense = table.astype(np.float64)[codes] * scale + zero
    outliers = np.zeros(dense.shape)
    if format.slots:
        index, residual, ends, outliers = slots(rng, format.slots, format.pool, dense.shape)
        arrays += [index, residual.view(np.uint16), ends]
    frequencies = (100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    if format.pre_rope:
        arrays += [frequencies, np.float32(FACTOR)]
    return Stored(
        format, reader_of(format, head_dim, heads, sink), arrays, dense, outliers, frequencies, sink
    )


def slots(
    rng: np.random.Generator, count: int, pool: int, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (index, residual, ends, the outliers as rows [B, K, S, H]): some pools are full, some
    empty, some all of a token or head."""
    batch, heads, tokens, channels = shape
    pools, places = tokens // pool, pool * channels
    index, residual = (
        np.zeros((batch, pools, count * pool), np.uint16),
        np.zeros((batch, pools, count * pool), np.float16),
    )
    ends, outliers = np.zeros((batch, pools, heads), np.uint16), np.zeros(shape)
    for b, p in np.ndindex(batch, pools):
        crowd = rng.random((heads, pool, channels))
        crowd[rng.integers(heads), rng.integers(pool)] += rng.integers(2)
        crowd[rng.integers(heads)] += rng.random() < 0.2
        used = (0, count * pool, int(rng.integers(count * pool + 1)))[rng.integers(3)]
        place = np.sort(np.argsort(-crowd.ravel())[:used])
        index[b, p, :used], residual[b, p, :used] = place % places, rng.normal(size=used) * 4
        ends[b, p] = np.searchsorted(place, places * np.arange(1, heads + 1))
        k, t, h = np.unravel_index(place, (heads, pool, channels))
        outliers[b, k, p * pool + t, h] = residual[b, p, :used]
    return index, residual, ends, outliers


def spoiled(stored: Stored, limits: Sequence[int], bits: int) -> list[np.ndarray]:
    """The arrays with everything overwritten that no token below a row's limit reads: words by
    ones, fp16 numbers by `bits`, and the outliers of pools by as many of every head."""
    _, heads, tokens, channels = stored.dense.shape
    format, found = stored.format, []
    sets, per_row = len(layout_of(format, channels).sets), tokens // stored.arrays[0].shape[2]
    sparse = (
        len(stored.arrays) - (5 if format.pre_rope else 3) if format.slots else len(stored.arrays)
    )
    for i, array in enumerate(stored.arrays):
        array = np.array(array)
        if i < sets:
            for b, limit in enumerate(limits):
                array[b, :, -(-limit // 32) * 32 // per_row :] = -1
        elif sparse <= i < sparse + 3:  # index, residual and ends
            size = array.shape[2]
            garbage = (
                np.arange(size) * 7,
                bits,
                np.arange(1, heads + 1) * (format.slots * format.pool // heads),
            )[i - sparse]
            for b, limit in enumerate(limits):
                array[b, -(-limit // format.pool) :] = garbage
        elif array.ndim > 2:  # a token's scales and zero points, [B, K, groups, S]
            for b, limit in enumerate(limits):
                array[b, ..., limit:] = bits
        found.append(array)
    return found


def structs(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in arrays]
