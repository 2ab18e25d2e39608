"""More kernels whose machine code is watched: polar or long groups of keys, the fused quantizer.

The quantizer is watched if its groups run over channels. If they run over tokens, it passes over a
group two times, or three if entries are not finite, in loops of a few tokens. Then no single loop
is the kernel, and the data decides which loops run. tests/aot/test_other_kernels.py caps its
registers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine_code.case import KV_HEADS, Case
from benchmarks.machine_code.cases import OUTER, attention_case
from benchmarks.machine_code.limits import slow_limits, usual_limits
from benchmarks.machine_code.sass import Function, Loop, loops
from benchmarks.machine_code.stored import polar, uniform
from kvq_jax.arrays.grouped_array import GroupFormat, Scheme
from kvq_jax.codecs.kernel_readers import grouped
from pallas_kernels.launch import Arithmetic, Launch
from pallas_kernels.quantize.kernel import quantize_rows
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN


def _polar(
    angle: int,
    radius: int,
    size: int,
    arithmetic: Arithmetic,
    channels: int = 128,
    value_bits: int | None = None,
    **limits: Any,
) -> Case:
    """Return attention to keys in polar form.

    size: tokens of a group.
    value_bits: bits of KIVI's values, or None for full precision.
    """
    format = value_bits and GroupFormat(value_bits, "asym", "channels", 32, channels, 32)
    kind = "exact" if value_bits is None else f"{value_bits}-bit"
    return attention_case(
        f"polar {angle}+{radius}, groups of {size}, {kind} values",
        polar(angle, radius, size, channels),
        uniform(format or None, channels),
        channels,
        arithmetic=arithmetic,
        **limits,
    )


def straight(function: Function) -> Loop:
    """Return the shortest way through a kernel. Raises ValueError if it has a loop."""
    if inside := loops(function):
        raise ValueError(
            f"{function.name} has {len(inside)} loops: an instruction may run more than once"
        )
    indices = shortest_way(function)
    return Loop(indices, tuple(function.instructions[i] for i in indices))


def shortest_way(function: Function) -> tuple[int, ...]:
    """Return the indices of the fewest instructions that lead from the first one to an end of the
    kernel."""
    before: dict[int, int | None] = {0: None}
    waiting = collections.deque([0])
    while waiting:
        index = waiting.popleft()
        nexts = function.successors(index)
        if not nexts:
            way = []
            step: int | None = index
            while step is not None:
                way.append(step)
                step = before[step]
            return tuple(reversed(way))
        for following in nexts:
            if following not in before:
                before[following] = index
                waiting.append(following)
    raise ValueError(f"{function.name} has no end")


def _quantizer(bits: int, scheme: Scheme, **limits: Any) -> Case:
    """Return the quantizer and packer of 16-bit rows, groups of 32 channels. "Stored" bits are
    those moved: element read, code written. It has no loop: its count is the shortest way through
    it, the way of finite entries. Others take longer branches."""
    channels, tokens = 128, 1024
    format = GroupFormat(bits, scheme, "channels", 32, channels, SPAN)
    reader = grouped(format)
    assert isinstance(reader, GroupedReader), reader
    rows = jax.ShapeDtypeStruct((2, KV_HEADS, tokens, channels), jnp.bfloat16)
    moved = 16 + format.code_bits + (2 if format.stores_zero else 1) * 16 / 32

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return lambda rows: quantize_rows(rows, reader, scheme, bits, launch=Launch("asm")), (rows,)

    name = f"quantize, {format.code_bits}-bit {scheme}, groups of channels, H {channels}, asm"
    return Case(
        name,
        build,
        f"quantize_{scheme}_channels",
        SPAN * channels,
        moved,
        mma_columns=None,
        part=straight,
        **limits,
    )


def _kivi(bits: int, size: int, channels: int = 128, **limits: Any) -> Case:
    """Return KIVI's case with keys in groups of more tokens than a span."""
    k, v = (
        uniform(
            GroupFormat(bits, "asym", axis, size if axis == "tokens" else 32, channels, size),
            channels,
        )
        for axis in OUTER
    )
    name = f"kivi, {bits}-bit, groups of {size} tokens"
    return attention_case(name, k, v, channels, **limits)


# Caps are 8 % above the counts, as in cases.py.
OTHER_CASES: tuple[Case, ...] = (
    _polar(4, 4, 128, "asm", **usual_limits(4.18, 1.05, 1.0, waits=True)),
    _polar(4, 4, 128, "jnp", **usual_limits(10.68, 1.7, 0.81, waits=True)),
    _polar(4, 4, 32, "asm", **usual_limits(4.15, 1.01, 1.0, waits=True)),
    _polar(4, 2, 64, "asm", **usual_limits(4.61, 1.26, 1.0, waits=True)),
    _polar(4, 2, 64, "jnp", **usual_limits(11.47, 2.27, 0.73, waits=True)),
    _polar(4, 4, 128, "asm", 256, **usual_limits(4.56, 1.13, 1.0, waits=True)),
    _polar(4, 4, 128, "jnp", 256, **usual_limits(11.16, 1.96, 0.78, waits=True)),
    _polar(4, 4, 128, "asm", value_bits=4, **usual_limits(5.01, 1.41, 0.79, waits=True)),
    _polar(4, 4, 128, "jnp", value_bits=4, **usual_limits(12.35, 2.0, 0.32, waits=True)),
    _kivi(2, 64, **usual_limits(2.73, 0.95, 0.86, waits=True)),
    _kivi(2, 128, **usual_limits(2.47, 0.88, 0.91, waits=True)),
    _kivi(4, 128, **usual_limits(2.66, 0.9, 1.0, waits=True)),
    _quantizer(2, "sym", **slow_limits(17.9, 6.35, 0.94)),
    _quantizer(2, "asym", **slow_limits(15.4, 4.07, 1.0)),
    _quantizer(2, "hybrid", **slow_limits(36.1, 7.31, 0.48, 130)),
)
