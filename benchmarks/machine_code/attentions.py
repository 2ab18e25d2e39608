"""Decode attention over every format that Mosaic GPU reads, and what its loop may cost there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine_code.case import BATCH, GROUP, KV_HEADS, TOKENS, Case
from benchmarks.machine_code.cases import INNER, OUTER, grouped
from benchmarks.machine_code.stored import (
    Stored,
    before_rope,
    polar,
    pools_of,
    runs,
    tables,
    uniform,
)
from benchmarks.machine_code.target import Target
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.grouped_array import GroupFormat, Scheme
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.tuning import tuning_for
from pallas_kernels.launch import KernelRoute, Launch
from pallas_kernels.mosaic import route as mosaic

KERNELS = {"mosaic": "decode_attention_mosaic_gpu_kernel", "triton": "decode_attention"}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Decode attention over one format, and what its loop may cost on Mosaic GPU.

    sides: keys and values, by head dim.
    multiply_adds: of the tensor cores for each element: the query columns, and the products that
        sum queries and weights.
    window: rows have a lower limit, in a ring.
    soft_cap: of scores.
    cap_instructions, cap_alu: limits for each element, on every GPU.
    loop_spills: its loop may spill.
    """

    name: str
    sides: Callable[[int], tuple[Stored, Stored]]
    cap_instructions: float
    cap_alu: float
    multiply_adds: float
    channels: int = 128
    queries: int = GROUP
    window: bool = False
    soft_cap: float | None = None
    cap_spill_bytes: int = 0
    loop_spills: bool = False

    def by(self, route: KernelRoute) -> bool:
        """Return True if this route reads the format."""
        keys, _, _ = self.sides(self.channels)[0]
        return route == "mosaic" or keys.off_triton is None

    def case(self, route: KernelRoute, target: Target) -> Case:
        """Return the case of one route. Triton's has its limits in cases.py, and none here."""
        (k_reader, k_stored, k_bits), (v_reader, v_stored, v_bits) = self.sides(self.channels)
        columns, launch = max(8, self.queries), Launch("asm", route=route)
        capability = "{}.{}".format(*target.capability)
        tuning = (
            mosaic.tuning_for(k_reader, v_reader, columns, TOKENS, capability)
            if route == "mosaic"
            else tuning_for(k_reader, v_reader, columns, TOKENS, True)
        )

        def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
            def attend(
                q: jax.Array, keys: Any, values: Any, limits: jax.Array, lower: jax.Array
            ) -> Any:
                return decode_attention(
                    q,
                    (k_reader, keys),
                    (v_reader, values),
                    limits,
                    capacity=TOKENS,
                    lower=LowerLimits(lower, TOKENS) if self.window else None,
                    soft_cap=self.soft_cap,
                    tuning=tuning,
                    launch=launch,
                )

            q = jax.ShapeDtypeStruct((BATCH, KV_HEADS, self.queries, self.channels), jnp.float32)
            rows = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
            return attend, (q, k_stored, v_stored, rows, rows)

        watched = route == "mosaic"
        unlimited = float("inf")
        return Case(
            f"{self.name}, {route}",
            build,
            KERNELS[route],
            tuning.tile * 2 * self.channels // (1 if route == "mosaic" else k_reader.parts),
            (k_bits + v_bits) / 2,
            cap_instructions=self.cap_instructions if watched else unlimited,
            cap_alu=self.cap_alu if watched else unlimited,
            min_share=0.0,
            plain_loads_allowed=not watched,
            loop_spills_allowed=not watched or self.loop_spills,
            cap_spill_bytes=self.cap_spill_bytes if watched else 10**6,
            mma_columns=self.multiply_adds if watched else None,
        )


def _innerq(bits: int, scheme: Scheme, *limits: float, **fields: Any) -> Attention:
    sides = functools.partial(grouped, bits, scheme, INNER)
    return _attention(f"innerq, {bits}-bit {scheme}", sides, limits, fields)


def _kivi(bits: int, *limits: float, **fields: Any) -> Attention:
    sides = functools.partial(grouped, bits, "asym", OUTER)
    return _attention(f"kivi, {bits}-bit", sides, limits, fields)


def _before_rope(bits: int, *limits: float, **fields: Any) -> Attention:
    """Return the groups of KIVI over keys before RoPE."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        _, values = grouped(bits, "asym", OUTER, channels)
        keys = before_rope(GroupFormat(bits, "asym", OUTER[0], 32, channels, 32), channels)
        return keys, values

    return _attention(f"kivi, {bits}-bit, before RoPE", sides, limits, fields)


def _normal_float(bits: int, *limits: float, **fields: Any) -> Attention:
    """Return tables whose scales all heads of a token share, on both sides."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        side = tables(bits, channels, ChannelGroup(KV_HEADS, channels))
        return side, side

    return _attention(f"nf{bits}", sides, limits, fields)


def _nuq(bits: int, *limits: float, **fields: Any) -> Attention:
    """Return KVQuant's tables without outliers: keys before RoPE with scales of channels, values
    with scales that all heads of a token share."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        group = ChannelGroup(KV_HEADS, channels)
        return tables(bits, channels, None, pre_rope=True), tables(bits, channels, group)

    return _attention(f"nuq{bits}, before RoPE", sides, limits, fields)


def _sparse(bits: int, *limits: float, **fields: Any) -> Attention:
    """Return KVQuant's tables with 1 % of outliers."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        of_keys, of_values = pools_of(1, channels)
        group = ChannelGroup(KV_HEADS, channels)
        keys = tables(bits, channels, None, of_keys, pre_rope=True)
        return keys, tables(bits, channels, group, of_values)

    return _attention(f"nuq{bits}-1%, before RoPE", sides, limits, fields)


def _turboquant(bits: int, *limits: float, **fields: Any) -> Attention:
    """Return tables with a norm for each head of a token, and the zero points that kernels add."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        side = tables(bits, channels, ChannelGroup(1, channels))
        return side, side

    return _attention(f"turboquant, {bits}-bit", sides, limits, fields)


def _polar(
    radius_bits: int, group: int, value_bits: int | None, *limits: float, **fields: Any
) -> Attention:
    """Return polar keys with angles of 4 bits, beside KIVI's values, or beside values in full
    precision if `value_bits` is None."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        format = value_bits and GroupFormat(value_bits, "asym", OUTER[1], 32, channels, 32)
        return polar(4, radius_bits, group, channels), uniform(format or None, channels)

    kind = "exact" if value_bits is None else f"{value_bits}-bit"
    name = f"polar 4+{radius_bits}, groups of {group}, {kind} values"
    return _attention(name, sides, limits, fields)


def _waterfill(bits: str, k_widths: str, v_widths: str, *limits: float, **fields: Any) -> Attention:
    """Return the widths that `waterfill:bits=` has by itself."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        return runs(k_widths, channels, keys=True), runs(v_widths, channels, keys=False)

    return _attention(f"waterfill, {bits} bits", sides, limits, fields)


def _eigen(bits: str, k_widths: str, v_widths: str, *limits: float, **fields: Any) -> Attention:
    """Return the same with keys in an eigenbasis, which a head's matrix makes keys of."""

    def sides(channels: int) -> tuple[Stored, Stored]:
        keys = runs(k_widths, channels, keys=True, eigen=True)
        return keys, runs(v_widths, channels, keys=False)

    name = f"waterfill in an eigenbasis, {bits} bits"
    return _attention(name, sides, limits, fields | {"loop_spills": True})


def _dense(*limits: float, **fields: Any) -> Attention:
    def sides(channels: int) -> tuple[Stored, Stored]:
        side = uniform(None, channels)
        return side, side

    return _attention("dense", sides, limits, fields)


def _attention(
    name: str,
    sides: Callable[[int], tuple[Stored, Stored]],
    limits: Sequence[float],
    fields: dict[str, Any],
) -> Attention:
    instructions, alu, multiply_adds = limits
    name = _name(name, fields)
    return Attention(name, sides, instructions, alu, multiply_adds, **fields)


def _name(name: str, fields: dict[str, Any]) -> str:
    queries = f", {fields['queries']} query heads" if "queries" in fields else ""
    window = ", window" if "window" in fields else ""
    cap = ", soft cap" if "soft_cap" in fields else ""
    return f"{name}, H {fields.get('channels', 128)}{queries}{window}{cap}"


ATTENTIONS = (
    _innerq(2, "sym", 1.9, 0.8, 10),
    _innerq(3, "hybrid", 3.2, 1.5, 10.5, cap_spill_bytes=128),
    _innerq(4, "hybrid", 2.6, 0.9, 9.5, cap_spill_bytes=64),  # 2.19 on an H200, 2.52 on an A100
    _innerq(2, "asym", 2.6, 0.9, 10.5),  # 2.24 on an H200, 2.52 on an L40
    _innerq(8, "sym", 2.6, 1.1, 8.5),
    _kivi(2, 2.6, 1.0, 12, cap_spill_bytes=128),  # 2.21 on an H200, 2.48 on an L40
    _kivi(4, 2.6, 1.05, 12, cap_spill_bytes=128),  # 2.09 on an H200, 2.50 on an A100
    _kivi(8, 3.2, 1.4, 12, cap_spill_bytes=128),
    _kivi(4, 2.9, 1.0, 12, channels=64, cap_spill_bytes=64),
    _kivi(4, 2.4, 0.9, 12, channels=256, cap_spill_bytes=128),
    _kivi(4, 3.6, 1.05, 24, queries=16),
    _before_rope(4, 3.7, 1.0, 8, cap_spill_bytes=128),  # 3.11 on an H200, 3.53 on an A100
    _before_rope(2, 3.6, 0.9, 8, cap_spill_bytes=128),
    _before_rope(4, 4.5, 1.3, 8, channels=64, cap_spill_bytes=64),  # 3.81, and 4.24 on an L40
    # 136 on a B200 since rows are swizzled, none in the loop
    _before_rope(4, 3.5, 0.9, 8, channels=256, cap_spill_bytes=136),
    # two spills in the loop of 4 bits on a B200, and one of 3 bits on an A100
    _nuq(4, 5.0, 3.15, 8, cap_spill_bytes=160, loop_spills=True),
    _nuq(3, 4.1, 2.15, 8, cap_spill_bytes=128, loop_spills=True),
    _sparse(4, 5.2, 3.15, 8, cap_spill_bytes=160, loop_spills=True),
    _sparse(3, 4.1, 2.15, 8, cap_spill_bytes=64),  # 28 with JAX 0.11.2
    # one spill in the loop on an A100
    _innerq(3, "hybrid", 3.2, 1.5, 10.5, window=True, cap_spill_bytes=128, loop_spills=True),
    _kivi(2, 2.6, 1.05, 12, window=True, cap_spill_bytes=128),  # 2.24 on an H200, 2.51 on an L40
    _kivi(4, 2.6, 1.05, 12, window=True, cap_spill_bytes=128),
    _kivi(4, 3.0, 1.05, 12, window=True, soft_cap=50.0, cap_spill_bytes=128),
    _normal_float(4, 3.95, 3.0, 8, cap_spill_bytes=128),
    _normal_float(3, 2.95, 1.9, 8, cap_spill_bytes=128),
    _normal_float(2, 2.6, 1.65, 8),
    _normal_float(4, 4.55, 3.15, 8, channels=64),
    _turboquant(3, 2.95, 1.9, 8, cap_spill_bytes=128),
    _polar(4, 128, None, 3.8, 0.65, 8),
    _polar(4, 128, 4, 4.3, 0.95, 8, cap_spill_bytes=128),  # 3.83 on an H200, 4.11 on an L40
    _polar(2, 64, None, 3.9, 0.7, 8),
    _polar(4, 128, None, 4.5, 0.95, 8, channels=64),  # 3.71 on an H200, 4.19 on an A100
    _polar(4, 128, None, 3.4, 0.55, 8, channels=256, cap_spill_bytes=128),
    _waterfill("2.5", "54332210", "54332110", 4.1, 1.45, 21, cap_spill_bytes=160),
    _waterfill("4", "65544332", "65544322", 4.5, 1.75, 22.5, cap_spill_bytes=160),
    # tiles of 512 tokens if two blocks of a multiprocessor have room for them
    _waterfill("2.5", "54332110", "54332110", 5.7, 1.8, 25, channels=64, cap_spill_bytes=160),
    _waterfill("4", "65544322", "65544322", 6.2, 2.2, 25, channels=64, cap_spill_bytes=160),
    # up to 28 spills in the loop (4 bits on an A100)
    _eigen("2.5", "54332210", "54332110", 6.8, 1.75, 78, cap_spill_bytes=320),
    _eigen("4", "65544332", "65544322", 7.5, 2.1, 86.5, cap_spill_bytes=640),
    _eigen("2.5", "54332110", "54332110", 6.7, 1.95, 57, channels=64, cap_spill_bytes=384),
    _eigen("4", "65544322", "65544322", 7.3, 2.4, 57, channels=64, cap_spill_bytes=160),
    _dense(2.1, 0.5, 8),
    _dense(2.7, 0.6, 8, channels=64),  # 1.95 on an H200, 2.59 on an L40, whose tiles are shorter
    _dense(1.8, 0.3, 8, channels=256),
)
