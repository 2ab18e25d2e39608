"""The formats that kernels read, and what their tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.packing import pack, unpack
from kvq_jax.codecs.kernel_readers import dense, grouped
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.grouped import GroupedReader
from tests.exhaustive import some

KINDS = {  # scheme, axis: how a side is grouped
    "inner_k": "channels",
    "inner_v": "tokens",
    "outer_k": "tokens",
    "outer_v": "channels",
}


def format_of(
    bits: int, scheme: Any, axis: Any, head_dim: int, group: int = 32, scale_dtype: str = "float16"
) -> GroupFormat:
    return GroupFormat(
        bits, scheme, axis, group, head_dim, max(32, group if axis == "tokens" else 32), scale_dtype
    )


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One pair of sides. A format of None is rows in bfloat16."""

    id: str
    k: GroupFormat | None
    v: GroupFormat | None
    head_dim: int
    group: int = 4


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Rows of a batch that end around the borders of tiles. The capacity is no multiple of the
    tile: the last one moves back."""

    capacity: int
    limits: tuple[int, ...]


def innerq(bits: int, scheme: str, head_dim: int, group: int = 4) -> KernelCase:
    k, v = (format_of(bits, scheme, axis, head_dim) for axis in ("channels", "tokens"))
    return KernelCase(f"innerq{bits}_{scheme}_h{head_dim}_g{group}", k, v, head_dim, group)


def kivi(bits: int, head_dim: int, group: int = 4, size: int = 32) -> KernelCase:
    k, v = (
        format_of(bits, "asym", "tokens", head_dim, size),
        format_of(bits, "asym", "channels", head_dim, 32),
    )
    return KernelCase(f"kivi{bits}_h{head_dim}_g{group}_size{size}", k, v, head_dim, group)


# bits are magnitude bits: symmetric and hybrid codes have one more
CASES = (
    innerq(1, "sym", 128),
    innerq(2, "hybrid", 128, 1),
    innerq(2, "asym", 64, 7),
    innerq(2, "sym", 64),
    innerq(3, "sym", 256, 8),
    innerq(4, "hybrid", 64, 4),
    innerq(8, "asym", 128),
    kivi(2, 128),
    kivi(2, 64, 8, 64),
    kivi(3, 64, 1),
    kivi(4, 128, 7),
    kivi(8, 64, 16),
    KernelCase(
        "k3_v4",
        format_of(3, "asym", "channels", 64, 16, "bfloat16"),
        format_of(4, "asym", "channels", 64, 64, "float32"),
        64,
    ),
    KernelCase("dense", None, None, 64, 4),
    KernelCase("k_dense_v2", None, format_of(2, "asym", "tokens", 128), 128, 1),
)


USUAL = [
    case
    for case in CASES
    if case.id
    in (
        "innerq1_sym_h128_g4",
        "innerq2_asym_h64_g7",
        "kivi2_h64_g8_size64",
        "kivi4_h128_g7_size32",
        "k3_v4",
        "dense",
    )
]


def kernel_cases(*ids: str) -> pytest.MarkDecorator:
    """Parametrizes a test over the cases, or over those named. Of all cases, a test on a CPU takes
    the usual ones without --exhaustive."""
    chosen = [case for case in CASES if case.id in ids] if ids else some(CASES, USUAL)
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.id)


def reader_of(format: GroupFormat | None, head_dim: int) -> Reader:
    """Return the reader of a format. Scales other than float16 are read within its range; caches
    that have them go to XLA."""
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
    return [
        leaf.struct for leaf in jax.tree.leaves(grouped_array.specs(format, batch, heads, tokens))
    ]


def stored_rows(format: GroupFormat | None, rows: np.ndarray) -> tuple[list[jax.Array], np.ndarray]:
    """Return (stored arrays, the rows they stand for) of rows [B, K, S, H]."""
    if format is None:
        half = jnp.asarray(rows, jnp.bfloat16)
        return [jax.lax.bitcast_convert_type(half, jnp.uint16)], np.asarray(half, np.float32)
    body = grouped_array.quantize(jnp.asarray(rows, jnp.float32), format)
    leaves = grouped_array.specs(format, 1, 1, format.block)
    arrays = jax.tree.map(lambda leaf, array: leaf.store(array), leaves, body)
    return jax.tree.leaves(arrays), np.asarray(grouped_array.dequantize(body))


def rows_with_neighbours_scales(format: GroupFormat | None, rows: np.ndarray) -> np.ndarray | None:
    """Return the rows that the stored arrays would stand for if every group had the scale of
    another one beside it; None without scales."""
    if format is None:
        return None
    body = grouped_array.quantize(jnp.asarray(rows, jnp.float32), format)
    axis = 2 if body.scale.shape[2] > 1 else 3
    return np.asarray(
        grouped_array.dequantize(dataclasses.replace(body, scale=jnp.roll(body.scale, 1, axis)))
    )


def spoiled(
    format: GroupFormat | None, arrays: list[jax.Array], limits: tuple[int, ...], garbage: float
) -> list[jax.Array]:
    """Return the stored arrays with all that no token below a row's limit reads overwritten: codes
    by ones, floats by `garbage`."""
    if format is None:
        return [
            _overwritten(
                arrays[0], 2, limits, np.asarray(jnp.asarray(garbage, jnp.bfloat16)).view(np.uint16)
            )
        ]
    sets, ones = len(format.layout.sets), (1 << format.code_bits) - 1
    codes = _overwritten(unpack(tuple(arrays[:sets]), format.layout), 2, limits, ones)
    value = np.asarray(jnp.asarray(garbage, format.scale_dtype))
    found = list(pack(codes, format.layout))
    for array in arrays[sets:]:
        stored = value.view(np.uint16) if array.dtype == jnp.uint16 else value
        if format.axis == "channels":
            found.append(_overwritten(array, 3, limits, stored))
        else:  # a group is in use as long as one of its tokens is
            found.append(
                _overwritten(
                    array, 2, tuple(-(-limit // format.group_size) for limit in limits), stored
                )
            )
    return found


def _overwritten(array: jax.Array, axis: int, limits: tuple[int, ...], value: Any) -> jax.Array:
    changed = np.array(array)
    for row, limit in zip(changed, limits, strict=True):
        np.moveaxis(row, axis - 1, 0)[limit:] = value
    return jnp.asarray(changed)


def row_errors(found: Any, wanted: Any) -> np.ndarray:
    """Relative error of each last-axis row; what is not finite counts as infinitely wrong."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    error = np.linalg.norm(found - wanted, axis=-1) / np.maximum(
        np.linalg.norm(wanted, axis=-1), 1e-30
    )
    return np.where(np.isfinite(error), error, np.inf)
