"""Quantize the block that leaves a window straight into the body: one launch for any batch, which does nothing where none leaves.

The arithmetic is that of kernel.py, program by program; only where rows are read and words are written differs. The body's arrays are
updated in place: what is not written keeps its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.kernel import QUANTIZE_TUNING, Packed, channel_kernel, check_format, token_kernel
from pallas_kernels.quantize.rounding import Job, Scheme
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.triton_call import triton_call, whole_array_but


def append_block(
    body: Packed,
    ring: Float[Array, "B K R H"],
    first: Int[Array, " B"],
    leaving: Int[Array, " B"],
    reader: GroupedReader,
    scheme: Scheme,
    bits: int,
    *,
    block: int,
    divisor: Float[Array, "B K 1 H"] | None = None,
    launch: Launch = LAUNCH,
) -> Packed:
    """Return `body` with tokens first[b] .. first[b] + block - 1 of each row b where leaving[b] > 0, quantized from the ring.

    ring: its slot s holds a token whose number is s modulo R, R a multiple of the block, so that a block never wraps. first: a multiple of
    the block. The other arguments are those of `quantize_rows`, and so are equations and exactness. Raises ValueError where the kernel
    cannot serve the format, or a block does not fit the ring.
    """
    slots = ring.shape[2]
    if slots % block:
        raise ValueError(f"a ring of {slots} slots does not hold whole blocks of {block} tokens")
    over_tokens = reader.axis == "tokens"
    unit = reader.group if over_tokens else SPAN
    check_format(ring[:, :, :block], reader, scheme, bits)
    arrays = [*body.words, body.scale, *([] if body.zero is None else [body.zero])]
    job = Job(reader, scheme, bits, divisor is not None, 1, launch.asm)
    inputs = [ring] if divisor is None else [ring, divisor.astype(jnp.float32)]
    scalars = [first.astype(jnp.int32), leaving.astype(jnp.int32)]
    channels = ring.shape[3]
    aliased = [whole_array_but(2, array, (0, 1)) for array in arrays]
    outputs = triton_call(
        functools.partial(_kernel, job=job, unit=unit, slots=slots),
        name=f"append_{scheme}_{reader.axis}",
        grid=(*ring.shape[:2], block // unit),
        in_specs=[
            *[pl.BlockSpec((1,), lambda b, k, s: (b,))] * len(scalars),
            *(whole_array_but(2, array, (0, 1)) for array in inputs),
            *aliased,
        ],
        out_specs=aliased,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        launch=launch,
        num_warps=1 if over_tokens else pl.next_power_of_2(pl.cdiv(channels, QUANTIZE_TUNING.warp_channels)),
        num_stages=1,
        aliases={len(scalars) + len(inputs) + i: i for i in range(len(arrays))},
    )(*scalars, *inputs, *arrays)
    sets = len(body.words)
    return Packed(tuple(outputs[:sets]), outputs[sets], None if body.zero is None else outputs[sets + 1])


class _Moved:
    """A ref that is indexed as kernel.py indexes the arrays of one group, in their place among all tokens."""

    def __init__(self, ref: Any, place: Callable[..., tuple[Any, ...]]):
        self._ref, self._place, self.dtype = ref, place, ref.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        return self._ref[self._place(*index)]

    def __setitem__(self, index: tuple[Any, ...], value: Array) -> None:
        self._ref[self._place(*index)] = value


def _kernel(first_ref: Any, leaving_ref: Any, *refs: Any, job: Job, unit: int, slots: int) -> None:
    # refs: ring [R, H], divisor [1, H] if any; the body's words [S / n, w], scale and zero as they were, and as they become
    count = (len(refs) - 1 - job.divided) // 2
    ring, *divisor = refs[: 1 + job.divided]
    *words, scale, zero = refs[-count:] if job.reader.centre is None else (*refs[-count:], None)
    start = pl.program_id(2) * unit  # outside of the branch, where an interpreted kernel knows it

    @pl.when(leaving_ref[0] > 0)
    def _() -> None:
        at, slot = first_ref[0] + start, first_ref[0] % slots + start
        views = _token_views if job.reader.axis == "tokens" else _channel_views
        kernel = token_kernel if job.reader.axis == "tokens" else channel_kernel
        rows, *others = views(job, ring, words, scale, zero, at, slot)
        kernel(rows, *divisor, *others, job=job)


def _token_views(job: Job, ring: Any, words: Sequence[Any], scale: Any, zero: Any, at: Array, slot: Array) -> list[_Moved]:
    """Return the views of a group that runs over tokens at..at + group - 1: arrays [1, group, H], [1, group / slots, w] and [1, H]."""
    row, group = at // job.reader.layout.slots, at // job.reader.group
    return [
        _Moved(ring, lambda _, token, columns: (pl.ds(slot + token, 1), columns)),
        *(_Moved(ref, lambda _, i, columns: (pl.ds(row + i, 1), columns)) for ref in words),
        *(_Moved(ref, lambda _, columns: (pl.ds(group, 1), columns)) for ref in (scale, zero) if ref is not None),
    ]


def _channel_views(job: Job, ring: Any, words: Sequence[Any], scale: Any, zero: Any, at: Array, slot: Array) -> list[_Moved]:
    """Return the views of a span of tokens whose groups run over channels: arrays [SPAN, H], [SPAN / slots, w] and [H / group, SPAN]."""
    count = SPAN // job.reader.layout.slots
    row = at // job.reader.layout.slots
    return [
        _Moved(ring, lambda tokens, columns: (pl.ds(slot + tokens.start, tokens.size), columns)),
        *(_Moved(ref, lambda _, columns: (pl.ds(row, count), columns)) for ref in words),
        *(_Moved(ref, lambda group, tokens: (group, pl.ds(at + tokens.start, tokens.size))) for ref in (scale, zero) if ref is not None),
    ]
