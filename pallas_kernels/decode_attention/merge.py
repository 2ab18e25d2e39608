"""Merge attention over parts of the tokens in one launch, exactly: the splits of the body, and the windows.

    m = max_i m_i,    l = sum_i 2^(m_i - m) l_i,    o = sum_i 2^(m_i - m) o_i,    out = o / l

One program merges some channels of all query heads of a KV head: a single sequence has few heads, and many splits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.partial_attention import NEG_INF, PartialAttention, Splits
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.readers.shared import LN2
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.triton_call import triton_call, whole_array_but

_TILE_ELEMENTS = 4096  # of the sums that a program holds: 32 registers of each of its threads
_MOST_AT_ONCE = 128  # splits of a loop step
_LEAST_CHANNELS = 8


def merged(parts: Sequence[Splits], group: int, *, launch: Launch = LAUNCH) -> PartialAttention:
    """Return the attention of `group` query heads over the tokens of all parts; zeros and m = NEG_INF where there is none."""
    heads = parts[0].m.shape[3]
    batch, kv_heads, _, channels, _ = parts[0].o.shape
    shapes = [jax.ShapeDtypeStruct((batch, kv_heads, *rest), jnp.float32) for rest in ((heads,), (heads,), (heads, channels))]
    m, l, o = _call(_store_part, "merge_splits", parts, [], shapes, launch)
    return PartialAttention(m[:, :, :group, None], l[:, :, :group, None], o[:, :, :group])


def finished(
    parts: Sequence[Splits], group: int, positions: Int[Array, " B"], *, capacity: int, dtype: DTypeLike, launch: Launch = LAUNCH
) -> Float[Array, "B K G H"]:
    """Return o / l of all parts in this dtype: zeros where there is no token, NaN in rows whose position is not below the capacity."""
    heads = parts[0].m.shape[3]
    batch, kv_heads, _, channels, _ = parts[0].o.shape
    shape = jax.ShapeDtypeStruct((batch, kv_heads, heads, channels), dtype)
    [out] = _call(functools.partial(_store_output, capacity=capacity), "finish_attention", parts, [positions], [shape], launch)
    return out[:, :, :group]


def _call(
    store: Callable[..., None],
    name: str,
    parts: Sequence[Splits],
    rows: Sequence[Int[Array, " B"]],
    shapes: Sequence[jax.ShapeDtypeStruct],
    launch: Launch,
) -> Any:
    """Launch the kernel with `store` at its end, which takes refs of one number for each row of the batch, and of the outputs."""
    batch, kv_heads, _, channels, heads = parts[0].o.shape
    steps = [min(_MOST_AT_ONCE, 1 << (part.m.shape[2].bit_length() - 1)) for part in parts]
    width = min(channels, max(_LEAST_CHANNELS, _TILE_ELEMENTS // (max(steps) * heads)))
    arrays = [array for part in parts for array in part]
    return triton_call(
        functools.partial(_kernel, store=store, steps=steps, width=width, asm=launch.asm),
        name=name,
        grid=(batch, kv_heads, channels // width),
        in_specs=[*[pl.BlockSpec((1,), lambda b, k, c: (b,))] * len(rows), *(whole_array_but(2, array, (0, 1)) for array in arrays)],
        out_specs=[whole_array_but(2, shape, (0, 1)) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=4,
        num_stages=1,
    )(*(row.astype(jnp.int32) for row in rows), *arrays)


def _kernel(*refs: Any, store: Any, steps: Sequence[int], width: int, asm: bool) -> None:
    # refs: numbers of the row; m [P, R], l [P, R] and o [P, H, R] of each part; outputs
    first = next(i for i, ref in enumerate(refs) if len(ref.shape) == 2)
    rows, parts, outputs = refs[:first], refs[first : first + 3 * len(steps)], refs[first + 3 * len(steps) :]
    heads, channels = parts[0].shape[1], pl.ds(pl.program_id(2) * width, width)
    carry = jnp.zeros((width, heads), jnp.float32), jnp.full((heads,), NEG_INF, jnp.float32), jnp.zeros((heads,), jnp.float32)
    for size, m_ref, l_ref, o_ref in zip(steps, parts[::3], parts[1::3], parts[2::3], strict=True):
        count = m_ref.shape[0]

        def step(i: Array, carry: Any, size=size, count=count, m_ref=m_ref, l_ref=l_ref, o_ref=o_ref) -> Any:
            sums, largest, total = carry
            start = jnp.minimum(i * size, count - size)  # the last step moves back; what an earlier one merged does not count again
            splits = pl.ds(start, size)
            fresh = (start + lax.broadcasted_iota(jnp.int32, (size,), 0) >= i * size)[:, None]
            m = jnp.where(fresh, m_ref[splits, :], NEG_INF)
            new = jnp.maximum(largest, jnp.max(m, axis=0))
            shrink, share = exp2(largest - new, asm), exp2(m - new[None], asm)
            sums = sums * shrink[None] + jnp.sum(o_ref[splits, channels, :] * share[:, None], axis=0)
            return sums, new, total * shrink + jnp.sum(l_ref[splits, :] * share, axis=0)

        carry = lax.fori_loop(0, pl.cdiv(count, size), step, carry)
    store(*rows, *outputs, channels, *carry)


def _store_part(m_ref: Any, l_ref: Any, o_ref: Any, channels: Any, sums: Array, largest: Array, total: Array) -> None:
    m_ref[...], l_ref[...] = largest * LN2, total
    o_ref[:, channels] = jnp.swapaxes(sums, 0, 1)


def _store_output(position_ref: Any, out_ref: Any, channels: Any, sums: Array, largest: Array, total: Array, *, capacity: int) -> None:
    out = sums / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[None]
    lost = jnp.broadcast_to(position_ref[0] >= capacity, out.shape)
    out_ref[:, channels] = jnp.swapaxes(jnp.where(lost, jnp.nan, out), 0, 1).astype(out_ref.dtype)
