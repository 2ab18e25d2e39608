"""Merge attention over parts of the tokens exactly, in one launch: the pieces of the body, and the
windows.

    m = max_i m_i,    l = sum_i 2^(m_i - m) l_i,    o = sum_i 2^(m_i - m) o_i,    out = o / l

One program merges some of the channels for all query heads of a KV head, because a single sequence
has few heads and many pieces.
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
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.partial_attention import NEG_INF, PartialAttention, Splits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.readers.shared import LN2
from pallas_kernels.tiles.arithmetic import exp2
from pallas_kernels.triton_call import plt, triton_call, whole_array_but

_TILE_ELEMENTS = 4096  # of the sums in a program: 32 registers per thread
# The fewest and the most pieces that a loop step merges: one long row among many has more pieces
# than usual.
_AT_ONCE = (16, 128)
_MIN_CHANNELS = 8

Parts = Splits | Pieces


def merged(parts: Sequence[Parts], group: int, *, launch: Launch = LAUNCH) -> PartialAttention:
    """Return the attention of `group` query heads over the tokens of all parts. Without any token
    it is zero, and m is NEG_INF.
    """
    batch, kv_heads, heads, channels = _sizes(parts[0])
    shapes = [
        jax.ShapeDtypeStruct((batch, kv_heads, *rest), jnp.float32)
        for rest in ((heads,), (heads,), (heads, channels))
    ]
    by_mosaic = mosaic.merged(parts, shapes, None, 0, launch)
    m, l, o = by_mosaic or _call(_store_part, "merge_splits", parts, [], shapes, launch)
    return PartialAttention(m[:, :, :group, None], l[:, :, :group, None], o[:, :, :group])


def merged_output(
    parts: Sequence[Parts],
    group: int,
    positions: Int[Array, " B"],
    *,
    capacity: int,
    dtype: DTypeLike,
    launch: Launch = LAUNCH,
) -> Float[Array, "B K G H"]:
    """Return o / l of all parts in `dtype`: zeros without any token, NaN in rows whose position is
    not below the capacity.
    """
    batch, kv_heads, heads, channels = _sizes(parts[0])
    shape = jax.ShapeDtypeStruct((batch, kv_heads, heads, channels), dtype)
    by_mosaic = mosaic.merged(parts, [shape], positions, capacity, launch)
    [out] = by_mosaic or _call(
        functools.partial(_store_output, capacity=capacity),
        "finish_attention",
        parts,
        [positions],
        [shape],
        launch,
    )
    return out[:, :, :group]


def _sizes(part: Parts) -> tuple[int, int, int, int]:
    """Return B, K, R and H."""
    if isinstance(part, Pieces):
        return part.schedule.rows, part.schedule.heads, part.m.shape[1], part.o.shape[1]
    batch, kv_heads, _, channels, heads = part.o.shape
    return batch, kv_heads, heads, channels


def _step(part: Parts) -> int:
    """Return how many pieces of a part a loop step merges, a power of two."""
    if isinstance(part, Splits):
        return min(_AT_ONCE[1], 1 << (part.m.shape[2].bit_length() - 1))
    minimum, maximum = _AT_ONCE
    return min(
        max(minimum, pl.next_power_of_2(part.schedule.usual_pieces)),
        maximum,
        1 << (part.schedule.pieces.bit_length() - 1),
    )


def _call(
    store: Callable[..., None],
    name: str,
    parts: Sequence[Parts],
    rows: Sequence[Int[Array, " B"]],
    shapes: Sequence[jax.ShapeDtypeStruct],
    launch: Launch,
) -> Any:
    """Launch the kernel that ends with `store`. `store` takes refs of one number per row of the
    batch, and refs of the outputs.
    """
    batch, kv_heads, heads, channels = _sizes(parts[0])
    steps = [_step(part) for part in parts]
    width = min(channels, max(_MIN_CHANNELS, _TILE_ELEMENTS // (max(steps) * heads)))
    arrays, specs = [], []
    for part in parts:
        fixed_axes = 2
        if isinstance(part, Pieces):
            fixed_axes = 0
            arrays.append(part.limits)
            specs.append(whole_array_but(0, part.limits, ()))
        for array in (part.m, part.l, part.o):
            arrays.append(array)
            specs.append(whole_array_but(fixed_axes, array, tuple(range(fixed_axes))))
    schedules = [part.schedule if isinstance(part, Pieces) else None for part in parts]
    return triton_call(
        functools.partial(
            _kernel,
            store=store,
            rows=len(rows),
            schedules=schedules,
            steps=steps,
            width=width,
            asm=launch.asm,
        ),
        name=name,
        grid=(batch, kv_heads, channels // width),
        in_specs=[*[pl.BlockSpec((1,), lambda b, k, c: (b,))] * len(rows), *specs],
        out_specs=[whole_array_but(2, shape, (0, 1)) for shape in shapes],
        out_shape=shapes,
        launch=launch,
        num_warps=4,
        num_stages=1,
    )(*(row.astype(jnp.int32) for row in rows), *arrays)


def _kernel(
    *refs: Any,
    store: Any,
    rows: int,
    schedules: Sequence[Schedule | None],
    steps: Sequence[int],
    width: int,
    asm: bool,
) -> None:
    # refs: numbers of the row. Of each part its limits, if it has a schedule, m [P, R], l [P, R]
    # and o [P, H, R]. Then the outputs.
    row_refs, left = refs[:rows], list(refs[rows:])
    channels, carry = pl.ds(pl.program_id(2) * width, width), None
    for size, schedule in zip(steps, schedules, strict=True):
        limits_ref = None
        if schedule is not None:
            limits_ref, *left = left
        m_ref, l_ref, o_ref, *left = left
        places, heads = _places(schedule, limits_ref, m_ref.shape[0]), m_ref.shape[1]
        if carry is None:
            carry = (
                jnp.zeros((width, heads), jnp.float32),
                jnp.full((heads,), NEG_INF, jnp.float32),
                jnp.zeros((heads,), jnp.float32),
            )
        for first, last in places:
            step = functools.partial(
                _merge_step,
                refs=(m_ref, l_ref, o_ref),
                channels=channels,
                size=size,
                first=first,
                last=last,
                asm=asm,
            )
            carry = lax.fori_loop(0, pl.cdiv(last - first, size), step, carry)
    assert carry is not None
    store(*row_refs, *left, channels, *carry)


def _places(schedule: Schedule | None, limits_ref: Any, count: int) -> list[tuple[Any, Any]]:
    """Return (first, end) of the places of this program's pieces, for each segment of its row."""
    if schedule is None:
        return [(0, count)]
    row, head = pl.program_id(0), pl.program_id(1)
    numbers = [row]
    if schedule.segments > 1:
        numbers = [row * schedule.segments + i for i in range(schedule.segments)]
    return [schedule.pieces_of(limits_ref, number, head) for number in numbers]


def _merge_step(
    i: Array,
    carry: tuple[Array, Array, Array],
    *,
    refs: tuple[Any, Any, Any],
    channels: Any,
    size: int,
    first: Any,
    last: Any,
    asm: bool,
) -> tuple[Array, Array, Array]:
    """Merge the i-th `size` of the pieces first .. last - 1."""
    (m_ref, l_ref, o_ref), (sums, largest, total) = refs, carry
    begin = first + i * size
    # The last step moves back, and masks the pieces that an earlier step has merged.
    start = jnp.minimum(begin, m_ref.shape[0] - size)
    places = pl.ds(start, size)
    place = start + lax.broadcasted_iota(jnp.int32, (size,), 0)
    fresh = (place >= begin) & (place < last)  # places without a unit may hold anything
    m = _loaded(m_ref.at[places, :], fresh, NEG_INF)
    new = jnp.maximum(largest, jnp.max(m, axis=0))
    shrink, share = exp2(largest - new, asm), exp2(m - new[None], asm)
    sums = sums * shrink[None] + jnp.sum(
        _loaded(o_ref.at[places, channels, :], fresh, 0.0) * share[:, None], axis=0
    )
    added = jnp.sum(_loaded(l_ref.at[places, :], fresh, 0.0) * share, axis=0)
    return sums, new, total * shrink + added


def _loaded(ref: Any, fresh: Bool[Array, " size"], other: float) -> Array:
    """Load the entries that are marked along the first axis, and `other` for the rest."""
    shape = ref.shape
    return plt.load(
        ref, mask=jnp.broadcast_to(fresh.reshape(-1, *[1] * (len(shape) - 1)), shape), other=other
    )


def _store_part(
    m_ref: Any, l_ref: Any, o_ref: Any, channels: Any, sums: Array, largest: Array, total: Array
) -> None:
    m_ref[...], l_ref[...] = largest * LN2, total
    o_ref[:, channels] = jnp.swapaxes(sums, 0, 1)


def _store_output(
    position_ref: Any,
    out_ref: Any,
    channels: Any,
    sums: Array,
    largest: Array,
    total: Array,
    *,
    capacity: int,
) -> None:
    out = sums / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[None]
    lost = jnp.broadcast_to(position_ref[0] >= capacity, out.shape)
    out_ref[:, channels] = jnp.swapaxes(jnp.where(lost, jnp.nan, out), 0, 1).astype(out_ref.dtype)
