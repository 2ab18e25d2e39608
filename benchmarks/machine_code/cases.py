"""The kernels whose machine code is watched, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine_code.case import BATCH, GROUP, KV_HEADS, TOKENS, Case
from benchmarks.machine_code.limits import slow_limits, usual_limits
from benchmarks.machine_code.stored import Stored, before_rope, pools_of, runs, tables, uniform
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.grouped_array import GroupedAxis, GroupFormat, Scheme
from kvq_jax.arrays.sparse_outliers import Pool
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import tuning_for
from pallas_kernels.launch import Arithmetic, Launch


def attention_case(
    name: str,
    k: Stored,
    v: Stored,
    channels: int,
    *,
    arithmetic: Arithmetic = "asm",
    queries: int = GROUP,
    **limits: Any,
) -> Case:
    """Return decode attention over these arrays, tuned as it runs. queries: query heads of each KV
    head."""
    (k_reader, k_stored, k_bits), (v_reader, v_stored, v_bits) = k, v
    columns = max(8, queries)
    tuning = tuning_for(k_reader, v_reader, columns, TOKENS, arithmetic == "asm")

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def attend(
            q: jax.Array, keys: list[jax.Array], values: list[jax.Array], limits: jax.Array
        ) -> Any:
            return decode_attention(
                q,
                (k_reader, keys),
                (v_reader, values),
                limits,
                capacity=TOKENS,
                launch=Launch(arithmetic),
            )

        q = jax.ShapeDtypeStruct((BATCH, KV_HEADS, queries, channels), jnp.float32)
        return attend, (q, k_stored, v_stored, jax.ShapeDtypeStruct((BATCH,), jnp.int32))

    name = ", ".join(
        [
            name,
            f"H {channels}",
            *([f"{queries} query heads"] if queries != GROUP else []),
            arithmetic,
        ]
    )
    step = tuning.tile // k_reader.parts
    limits = {"mma_columns": columns} | limits
    return Case(
        name, build, "decode_attention", step * 2 * channels, (k_bits + v_bits) / 2, **limits
    )


INNER: tuple[GroupedAxis, GroupedAxis] = (
    "channels",
    "tokens",
)  # keys, values: groups over the axis that a product sums over
OUTER: tuple[GroupedAxis, GroupedAxis] = ("tokens", "channels")


def grouped(
    bits: int, scheme: Scheme, axes: tuple[GroupedAxis, GroupedAxis], channels: int
) -> tuple[Stored, Stored]:
    """Return keys and values in uniform groups. `bits` of a code include its sign."""
    magnitude = bits - (scheme != "asym")
    k, v = (
        uniform(GroupFormat(magnitude, scheme, axis, 32, channels, 32), channels) for axis in axes
    )
    return k, v


def _innerq(bits: int, scheme: Scheme, channels: int, **limits: Any) -> Case:
    k, v = grouped(bits, scheme, INNER, channels)
    return attention_case(f"innerq, {bits}-bit {scheme}", k, v, channels, **limits)


def _kivi(bits: int, channels: int, **limits: Any) -> Case:
    k, v = grouped(bits, "asym", OUTER, channels)
    return attention_case(f"kivi, {bits}-bit", k, v, channels, **limits)


def _kivi_before_rope(arithmetic: Arithmetic, **limits: Any) -> Case:
    keys = before_rope(GroupFormat(4, "asym", OUTER[0], 32, 128, 32), 128)
    _, values = grouped(4, "asym", OUTER, 128)
    return attention_case(
        "kivi, 4-bit, before RoPE", keys, values, 128, arithmetic=arithmetic, **limits
    )


def _nuq(bits: int, percent: int, channels: int, pre_rope: bool = True, **limits: Any) -> Case:
    """Return KVQuant's case: keys with scales of channels, values with scales of whole tokens,
    outliers as its paper counts them."""
    pools: tuple[Pool | None, ...] = None, None
    if percent:
        pools = pools_of(percent, channels)
    k = tables(bits, channels, None, pools[0], pre_rope)
    v = tables(bits, channels, ChannelGroup(KV_HEADS, channels), pools[1])
    name = f"nuq{bits}{f'-{percent}%' if percent else ''}, {'before' if pre_rope else 'after'} RoPE"
    return attention_case(name, k, v, channels, **limits)


def _waterfill(
    bits: str,
    k_widths: str,
    v_widths: str,
    channels: int,
    arithmetic: Arithmetic = "asm",
    **limits: Any,
) -> Case:
    """Return waterfill's case, with the widths that `waterfill:bits=` has by itself."""
    k, v = runs(k_widths, channels, keys=True), runs(v_widths, channels, keys=False)
    stored = (
        channels * sum(width != "0" for width in widths) // len(widths)
        for widths in (k_widths, v_widths)
    )
    k_share, v_share = (
        16 * -(-of_side // 16) / channels for of_side in stored
    )  # dots take chunks of 16
    columns = (
        8 * (2 * k_share + 2 + v_share) / 2
    )  # keys that are stored, and all means, meet the queries and their partners
    return attention_case(
        f"waterfill, {bits} bits",
        k,
        v,
        channels,
        arithmetic=arithmetic,
        mma_columns=columns,
        **limits,
    )


DENSE = uniform(None, 128), uniform(None, 128)  # keys, values: unquantized rows in bfloat16
# Caps are 8 % above the larger count of the two targets with JAX 0.10.2 and ptxas 13.5: counts move
# with the compiler.
CASES: tuple[Case, ...] = (
    _innerq(2, "sym", 128, **usual_limits(2.07, 0.83, 0.95) | {"cap_spill_bytes": 126}),
    _innerq(2, "sym", 64, **usual_limits(2.4, 0.89, 0.9)),
    _innerq(2, "sym", 256, **usual_limits(1.99, 0.78, 0.95)),
    _innerq(2, "sym", 128, queries=16, **slow_limits(2.99, 0.95, 0.72)),
    _innerq(2, "asym", 128, **usual_limits(2.35, 0.85, 0.95)),
    _innerq(
        3,
        "sym",
        128,
        **usual_limits(2.77, 1.48, 0.9) | {"loop_spills_allowed": True, "cap_spill_bytes": 385},
    ),
    _innerq(3, "sym", 64, **usual_limits(3.13, 1.56, 0.9, waits=True)),
    _innerq(3, "hybrid", 128, **usual_limits(3.5, 1.61, 0.9, waits=True)),
    _innerq(3, "hybrid", 64, **usual_limits(3.45, 1.57, 0.95, waits=True)),
    _innerq(4, "sym", 128, **usual_limits(2.07, 0.83, 1.0) | {"cap_spill_bytes": 83}),
    _innerq(4, "hybrid", 128, **usual_limits(2.49, 0.87, 1.0)),
    _innerq(5, "sym", 128, **usual_limits(3.33, 1.75, 1.0, waits=True)),
    _innerq(5, "hybrid", 128, **usual_limits(3.77, 1.81, 1.0, waits=True)),
    _innerq(8, "asym", 64, **usual_limits(3.15, 1.19, 1.0)),
    _innerq(8, "asym", 128, **usual_limits(3.17, 1.16, 1.0)),
    _innerq(8, "sym", 128, **usual_limits(2.85, 1.21, 1.0)),
    _innerq(8, "hybrid", 128, **usual_limits(3.17, 1.16, 1.0)),
    _kivi(2, 128, **usual_limits(2.46, 0.83, 0.9)),
    _kivi(2, 64, **usual_limits(2.76, 0.91, 0.8)),
    _kivi(2, 256, **usual_limits(2.38, 0.79, 0.9)),
    _kivi(3, 128, **usual_limits(4.37, 2.35, 0.73, waits=True)),
    _kivi(4, 128, **usual_limits(2.62, 0.88, 1.0)),
    _kivi(4, 64, **usual_limits(2.81, 0.95, 1.0)),
    _kivi(4, 256, **usual_limits(2.89, 0.94, 1.0, waits=True)),
    _kivi(8, 128, **usual_limits(3.12, 1.29, 1.0)),
    _kivi(4, 128, queries=16, **usual_limits(3.69, 1.01, 0.95, waits=True)),
    _kivi_before_rope("asm", **slow_limits(4.13, 0.98, 0.9, 281)),
    _nuq(2, 0, 128, pre_rope=False, **slow_limits(2.81, 1.72, 0.5)),
    _nuq(3, 0, 128, pre_rope=False, **slow_limits(3.28, 1.99, 0.65)),
    _nuq(4, 0, 128, pre_rope=False, **slow_limits(4.3, 3.19, 0.54, 108)),
    _nuq(3, 0, 128, **slow_limits(4.75, 2.35, 0.54, 653)),
    _nuq(2, 1, 128, **slow_limits(4.77, 2.13, 0.43, 221)),
    _nuq(3, 1, 128, **slow_limits(5.35, 2.51, 0.54, 590)),
    _nuq(4, 1, 128, **slow_limits(7.06, 3.81, 0.49)),
    attention_case(
        "nf4, groups of 64",
        tables(4, 128, ChannelGroup(1, 64)),
        tables(4, 128, ChannelGroup(1, 64)),
        128,
        **slow_limits(5.13, 3.36, 0.57, 415),
    ),
    _waterfill("2.5", "54332210", "54332110", 128, **slow_limits(6.66, 2.59, 0.32)),
    _waterfill("4", "65544332", "65544322", 128, **slow_limits(8.0, 3.45, 0.43)),
    _waterfill("2.5", "54332110", "54332110", 64, **slow_limits(9.33, 3.73, 0.23)),
    _waterfill("4", "65544322", "65544322", 64, **slow_limits(10.64, 4.81, 0.32)),
    attention_case("dense, bf16", *DENSE, 128, **usual_limits(1.4, 0.5, 1.0)),
    # The default arithmetic.
    _innerq(2, "sym", 128, arithmetic="jnp", **slow_limits(2.46, 0.91, 0.89, 186)),
    _innerq(
        2,
        "asym",
        128,
        arithmetic="jnp",
        **usual_limits(3.16, 0.92, 0.81) | {"loop_spills_allowed": True, "cap_spill_bytes": 144},
    ),
    _innerq(3, "hybrid", 128, arithmetic="jnp", **usual_limits(4.34, 1.77, 0.79, waits=True)),
    _innerq(
        4,
        "sym",
        128,
        arithmetic="jnp",
        **usual_limits(2.59, 0.98, 1.0) | {"loop_spills_allowed": True, "cap_spill_bytes": 368},
    ),
    _innerq(4, "hybrid", 128, arithmetic="jnp", **usual_limits(3.51, 1.08, 1.0)),
    _kivi(2, 128, arithmetic="jnp", **usual_limits(3.55, 1.08, 0.75)),
    _kivi(4, 128, arithmetic="jnp", **usual_limits(4.68, 1.98, 1.0)),
    _kivi_before_rope("jnp", **usual_limits(9.0, 3.94, 0.47, waits=True)),
    _nuq(
        4, 0, 128, pre_rope=False, arithmetic="jnp", **usual_limits(16.03, 14.64, 0.11, waits=True)
    ),
    _waterfill("2.5", "54332210", "54332110", 128, "jnp", **slow_limits(9.53, 3.78, 0.22)),
    attention_case("dense, bf16", *DENSE, 128, arithmetic="jnp", **usual_limits(1.4, 0.5, 1.0)),
)
