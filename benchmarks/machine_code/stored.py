"""The arrays that the watched kernels read: codes of a whole cache, by shape and dtype."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from benchmarks.machine_code.case import BATCH, KV_HEADS, TOKENS
from kvq_jax.arrays import grouped_array, polar_array, sparse_outliers
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.packing import run_layout
from kvq_jax.arrays.polar_array import PolarFormat
from kvq_jax.arrays.sparse_outliers import Pool, outliers_per_side, pool_of
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.codecs import kernel_readers
from kvq_jax.codecs.kernel_readers import codebook, dense, grouped, rotated
from kvq_jax.methods.kvquant.method import KVQuant
from pallas_kernels.readers.base import Reader
from pallas_kernels.tiles.layout import plane_layout

Stored = tuple[
    Reader, list[jax.ShapeDtypeStruct], float
]  # reader, stored arrays, stored bits of one element


def _bits(arrays: Iterable[jax.ShapeDtypeStruct], channels: int) -> float:
    """Return the stored bits for each element of rows of `channels` channels."""
    return 8 * kvq.size.nbytes(list(arrays)) / (BATCH * KV_HEADS * TOKENS * channels)


def uniform(format: GroupFormat | None, channels: int) -> Stored:
    """Return groups of uniform codes, or unquantized rows."""
    if format is None:
        reader, stored = (
            dense(channels, "bfloat16"),
            [jax.ShapeDtypeStruct((BATCH, KV_HEADS, TOKENS, channels), jnp.uint16)],
        )
    else:
        reader = grouped(format)
        stored = [
            leaf.struct
            for leaf in jax.tree.leaves(grouped_array.specs(format, BATCH, KV_HEADS, TOKENS))
        ]
    assert isinstance(reader, Reader), reader
    return reader, stored, _bits(stored, channels)


def tables(
    bits: int,
    channels: int,
    group: ChannelGroup | None,
    pool: Pool | None = None,
    pre_rope: bool = False,
) -> Stored:
    """Return codes of a codebook, as `kernel_readers.codebook` describes them. Arrays that all
    tokens share do not count as stored."""
    layout = plane_layout(bits, channels, 32)
    reader = codebook(layout, group, pool=pool.tokens if pool else 0, pre_rope=pre_rope)
    assert isinstance(reader, Reader), reader
    words = [(BATCH, KV_HEADS, TOKENS // layout.slots, layout.words(b)) for b in layout.sets]
    shapes: list[tuple[tuple[int, ...], Any]] = [(shape, jnp.int16) for shape in words]
    shapes.append(((1 << bits,), jnp.float32))
    wide = (
        None
        if group is None
        else BodySpec(group.axes(BATCH, KV_HEADS, TOKENS, channels), "float16")
    )
    shapes += 2 * [
        ((KV_HEADS, channels), jnp.float32) if wide is None else (wide.shape, wide.struct.dtype)
    ]
    if pool is not None:
        outliers = sparse_outliers.specs(BATCH, KV_HEADS, TOKENS, pool, "float16")
        shapes += [(leaf.shape, leaf.struct.dtype) for leaf in jax.tree.leaves(outliers)]
    shapes += [((channels // 2,), jnp.float32), ((), jnp.float32)] if pre_rope else []
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    of_tokens = (struct for struct in structs if len(struct.shape) > 2)
    return reader, structs, _bits(of_tokens, channels)


def pools_of(percent: int, channels: int) -> tuple[Pool, Pool]:
    """Return the slots of keys and of values for outliers as KVQuant's paper counts them. No kernel
    reads the counts of others."""
    slots = 2 * outliers_per_side(percent / 100, KV_HEADS * channels)
    return (
        pool_of(32, slots * KVQuant().slots, channels, False),
        pool_of(32, slots, channels, False),
    )


def before_rope(format: GroupFormat, channels: int) -> Stored:
    reader, stored, bits = uniform(format, channels)
    turned = rotated(reader)
    assert isinstance(turned, Reader), turned
    return (
        turned,
        [
            *stored,
            jax.ShapeDtypeStruct((channels // 2,), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.float32),
        ],
        bits,
    )


def polar(angle_bits: int, radius_bits: int, group: int, channels: int) -> Stored:
    """Return keys in polar form, with steps for groups of `group` tokens."""
    format = PolarFormat(angle_bits, radius_bits, channels, group, group)
    reader = kernel_readers.polar(
        format.layout, angle_bits, group, format.scale_dtype, grouped_angles=True
    )
    assert isinstance(reader, Reader), reader
    specs = polar_array.specs(format, BATCH, KV_HEADS, TOKENS)
    stored = [leaf.struct for leaf in jax.tree.leaves(specs)]
    return reader, stored, _bits(stored, channels)


def runs(widths: str, channels: int, *, keys: bool, eigen: bool = False) -> Stored:
    """Return keys before RoPE, in an eigenbasis if `eigen`, or values in chunks of these widths, a
    digit for each."""
    chunk = channels // len(widths)
    runs = [
        (int(width), chunk * len(list(same)))
        for width, same in itertools.groupby(widths)
        if width != "0"
    ]
    layouts = [run_layout(width, of_run, 32) for width, of_run in runs]
    reader = kernel_readers.runs(layouts, channels, pre_rope=keys, synthesis=eigen)
    assert isinstance(reader, Reader), reader
    f, row = jnp.float32, (KV_HEADS, channels)
    stored = [
        jax.ShapeDtypeStruct(
            (BATCH, KV_HEADS, TOKENS // layout.slots, layout.words(bits)), jnp.int16
        )
        for layout in layouts
        for bits in layout.sets
    ]
    stored.append(jax.ShapeDtypeStruct((BATCH, KV_HEADS, TOKENS), jnp.int8))
    in_pairs = [(row, jnp.int32), (row, f), (row, f)]
    in_eigenbasis = [((*row, channels), f), (row, f)]
    rope = [((channels // 2,), f), ((), f)] if keys else []
    shared = [((8,), f), *(in_pairs if keys and not eigen else in_eigenbasis), *rope]
    structs = [*stored, *(jax.ShapeDtypeStruct(*shape) for shape in shared)]
    return reader, structs, _bits(stored, channels)
