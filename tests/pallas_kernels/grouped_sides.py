"""Sides of uniform groups, and of full-precision rows."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.codecs.kernel_readers import dense, grouped
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.grouped import GroupedReader
from tests.pallas_kernels.compiled import dequantize_groups, pack, stored_groups, unpack
from tests.pallas_kernels.harness import Shape, StoredSide


def format_of(
    bits: int, scheme: Any, axis: Any, head_dim: int, group: int = 32, scale_dtype: str = "float16"
) -> GroupFormat:
    block = max(32, group if axis == "tokens" else 32)
    return GroupFormat(bits, scheme, axis, group, head_dim, block, scale_dtype)


def reader_of(format: GroupFormat | None, head_dim: int) -> Reader:
    """Return the reader of a format, or of bfloat16 rows for None.

    Scales other than float16 are read within its range. (Caches that have them use XLA.)
    """
    if format is None:
        reader = dense(head_dim, "bfloat16")
        assert isinstance(reader, Reader), reader
        return reader
    reader = grouped(dataclasses.replace(format, scale_dtype="float16"))
    assert isinstance(reader, GroupedReader), reader
    return dataclasses.replace(reader, scale_dtype=format.scale_dtype)


def stored_structs(
    format: GroupFormat | None, batch: int, heads: int, tokens: int, head_dim: int
) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays of a side as a cache stores them."""
    if format is None:
        return [jax.ShapeDtypeStruct((batch, heads, tokens, head_dim), jnp.uint16)]
    specs = grouped_array.specs(format, batch, heads, tokens)
    return [leaf.struct for leaf in jax.tree.leaves(specs)]


def side_of(format: GroupFormat | None, rows: np.ndarray) -> StoredSide:
    """Return the side that stores rows [B, K, S, H]."""
    reader = reader_of(format, rows.shape[3])
    if format is None:
        half = jnp.asarray(rows, jnp.bfloat16)
        arrays = [jax.lax.bitcast_convert_type(half, jnp.uint16)]
        spoiled = functools.partial(_spoiled_rows, arrays)
        return StoredSide(reader, arrays, np.asarray(half, np.float32), dict, spoiled)
    body, arrays, meant = stored_groups(jnp.asarray(rows, jnp.float32), format)

    def misread() -> dict[str, np.ndarray]:
        axis = 2 if body.scale.shape[2] > 1 else 3
        shifted = dataclasses.replace(body, scale=jnp.roll(body.scale, 1, axis))
        return {"with a neighbour's scales": np.asarray(dequantize_groups(shifted))}

    spoiled = functools.partial(_spoiled_groups, format, arrays)
    return StoredSide(reader, arrays, np.asarray(meant), misread, spoiled)


def random_rows(shape: Shape, seed: int) -> np.ndarray:
    """Return rows in which some channels are large."""
    rows = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    rows[..., :: shape[3] // 4] *= 3
    return rows


def grouped_side(format: GroupFormat | None) -> Callable[[Shape, int], StoredSide]:
    """Return what makes random sides of a format. None is bfloat16 rows."""
    return lambda shape, seed: side_of(format, random_rows(shape, seed))


def _spoiled_rows(
    arrays: list[jax.Array], limits: Sequence[int], garbage: float
) -> list[jax.Array]:
    bits = np.asarray(jnp.asarray(garbage, jnp.bfloat16)).view(np.uint16)
    return [_overwritten(arrays[0], 2, limits, bits)]


def _spoiled_groups(
    format: GroupFormat, arrays: list[jax.Array], limits: Sequence[int], garbage: float
) -> list[jax.Array]:
    """Overwrite codes by ones, and floats by `garbage`."""
    sets, ones = len(format.layout.sets), (1 << format.code_bits) - 1
    codes = _overwritten(unpack(tuple(arrays[:sets]), format.layout), 2, limits, ones)
    value = np.asarray(jnp.asarray(garbage, format.scale_dtype))
    # a group is in use as long as one of its tokens is
    groups = [-(-limit // format.group_size) for limit in limits]
    axis, live = (3, limits) if format.axis == "channels" else (2, groups)
    spoiled = list(pack(codes, format.layout))
    for array in arrays[sets:]:
        bits = value.view(np.uint16) if array.dtype == jnp.uint16 else value
        spoiled.append(_overwritten(array, axis, live, bits))
    return spoiled


def _overwritten(array: jax.Array, axis: int, limits: Sequence[int], value: Any) -> jax.Array:
    changed = np.array(array)
    for row, limit in zip(changed, limits, strict=True):
        np.moveaxis(row, axis - 1, 0)[limit:] = value
    return jnp.asarray(changed)
