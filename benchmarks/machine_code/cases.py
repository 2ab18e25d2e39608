"""The kernels whose machine code is watched, and what it may cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.report import KernelReport, measure
from benchmarks.machine_code.target import Target
from kvq_jax.arrays import grouped_array, sparse_outliers
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.grouped_array import GroupedAxis, GroupFormat, Scheme
from kvq_jax.arrays.packing import run_layout
from kvq_jax.arrays.sparse_outliers import Pool, outliers_per_side, pool_of
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.codecs import kernel_readers
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernel_readers import dense, grouped, nonuniform, rotated
from kvq_jax.methods.kvquant.method import KVQuant
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import TUNING, tuning_for
from pallas_kernels.launch import Arithmetic, Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.tiles.layout import plane_layout

MOST_REGISTERS = (
    255  # of a thread, and eight warps on a multiprocessor, for which splits are chosen
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its limits, which hold on every target and with every JAX, but for A100_LIMITS
    and NEWER_LIMITS.

    build: makes the function to compile and its arguments, trees of jax.ShapeDtypeStruct. kernel: a
    regular expression for the whole name of the kernel in it. elements_per_iteration: cached
    elements that a block reads in one iteration of the main loop, K and V together. stored_bits: of
    one cached element, with scales and zero points. cap_instructions, cap_alu: per cached element.
    min_share: of the memory limit, if every issue slot were filled. cap_spill_bytes: of a thread,
    in the whole kernel; a few, outside of the loop, cost nothing. mma_columns: query heads, padded,
    that each cached element is multiplied with; None where a warp repeats work.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    kernel: str
    elements_per_iteration: int
    stored_bits: float
    cap_instructions: float
    cap_alu: float
    min_share: float
    plain_loads_allowed: bool = False
    loop_spills_allowed: bool = False
    cap_spill_bytes: int = 64
    mma_columns: float | None = 8

    def measure(self, target: Target) -> KernelReport:
        """Compile the case and measure its kernel; this takes seconds."""
        function, arguments = self.build()
        kernel = compile_for(target, function, arguments).kernel(self.kernel)
        return measure(
            self.name,
            kernel,
            target,
            elements_per_iteration=self.elements_per_iteration,
            stored_bits=self.stored_bits,
        )

    def failures(self, report: KernelReport) -> list[str]:
        """Return the limits that a report breaks, in words."""
        own = A100_LIMITS.get(self.name, {}) if report.target == "a100" else {}
        if jax.__version_info__ >= NEWER:
            own = own | NEWER_LIMITS.get(self.name, {})
        return dataclasses.replace(self, **own)._failures(report)

    def _failures(self, report: KernelReport) -> list[str]:
        instructions, alu, columns = (
            report.instructions_per_element,
            report.alu_per_element,
            report.mma_columns,
        )
        checks = (
            (
                f"{instructions:.2f} instructions per element, at most {self.cap_instructions}",
                instructions > self.cap_instructions,
            ),
            (
                f"{alu:.2f} integer operations and conversions per element, at most {self.cap_alu}",
                alu > self.cap_alu,
            ),
            (
                f"{report.bound:.0%} of the memory limit, at least {self.min_share:.0%}",
                report.bound < self.min_share,
            ),
            (
                f"{report.plain_loads} loads in the loop that are not asynchronous",
                report.plain_loads and not self.plain_loads_allowed,
            ),
            (
                f"{report.loop_spills} spills in the loop",
                report.loop_spills and not self.loop_spills_allowed,
            ),
            (
                f"{report.spill_bytes} bytes spilled, at most {self.cap_spill_bytes}",
                report.spill_bytes > self.cap_spill_bytes,
            ),
            (
                f"{report.registers} registers, at most {MOST_REGISTERS}",
                report.registers > MOST_REGISTERS,
            ),
            (
                (
                    f"{columns:g} multiply-adds per element, not {self.mma_columns}: is"
                    f" {self.elements_per_iteration=} what the loop reads?"
                ),
                self.mma_columns is not None and columns != self.mma_columns,
            ),
        )
        return [f"{self.name} on {report.target}: {line}" for line, broken in checks if broken]


BATCH, KV_HEADS, GROUP, TOKENS = 16, 8, 4, 16384  # Llama 3.1 8B
Limits = dict[str, Any]  # of a case: its fields from cap_instructions on
# What an A100 has of its own, 8 % above its counts. Its memory is half as fast, so that twice the
# instructions fit, and where ptxas makes another schedule for it than for an H200 little is lost:
# all of these but tables, and array operations of KIVI with 2 bits or before RoPE, are at the limit
# of memory (docs/kernels.md).
A100_LIMITS: dict[str, Limits] = {
    "innerq, 2-bit sym, H 128, 16 query heads, asm": {"cap_spill_bytes": 126},
    "innerq, 2-bit asym, H 128, asm": {"cap_spill_bytes": 139},
    "innerq, 3-bit hybrid, H 64, asm": {"cap_alu": 1.71},
    "innerq, 8-bit asym, H 64, asm": {"cap_alu": 1.31},
    "innerq, 8-bit asym, H 128, asm": {"cap_alu": 1.4},
    "innerq, 8-bit sym, H 128, asm": {"cap_alu": 1.35},
    "innerq, 8-bit hybrid, H 128, asm": {"cap_alu": 1.4},
    "kivi, 2-bit, H 128, asm": {"loop_spills_allowed": True, "cap_spill_bytes": 3418},
    "kivi, 2-bit, H 64, asm": {"loop_spills_allowed": True, "cap_spill_bytes": 385},
    "nuq4, after RoPE, H 128, asm": {"cap_spill_bytes": 350},
    "nuq3, before RoPE, H 128, asm": {"cap_spill_bytes": 1582},
    "nuq3-1%, before RoPE, H 128, asm": {"cap_spill_bytes": 683},
    "nf4, groups of 64, H 128, asm": {"cap_spill_bytes": 666},
    "innerq, 4-bit sym, H 128, jnp": {"cap_spill_bytes": 726},
    "kivi, 2-bit, H 128, jnp": {"cap_instructions": 4.37, "cap_alu": 1.84},
    "kivi, 4-bit, before RoPE, H 128, jnp": {"cap_spill_bytes": 100},
    "q K^T, innerq 2-bit asym, H 128, asm": {"cap_alu": 0.95, "loop_spills_allowed": True},
    "polar 4+2, groups of 64, exact values, H 128, asm": {"cap_spill_bytes": 83},
    "kivi, 2-bit, groups of 128 tokens, H 128, asm": {
        "loop_spills_allowed": True,
        "cap_spill_bytes": 2096,
    },
}
NEWER = (0, 11)  # from this JAX on, with another Triton
# What JAX 0.11.2 and 0.12 have of their own, 8 % above the larger count. Read in their PTX:
# full-precision rows are taken apart and joined again by 128 permutations in a loop (0.12);
# symmetric InnerQ in array operations brings scales to their lanes by 32 exchanges and as many
# permutations; a product p V of its own waits for the weights that it loads (0.11.2). KIVI before
# RoPE has the same instructions in another order, of which ptxas spills more. Why tables before
# RoPE take more was not found out (docs/kernels.md).
NEWER_LIMITS: dict[str, Limits] = {
    "dense, bf16, H 128, asm": {"cap_alu": 0.58},
    "dense, bf16, H 128, jnp": {"cap_alu": 0.58},
    "innerq, 2-bit sym, H 128, jnp": {"cap_alu": 1.04},
    "kivi, 4-bit, before RoPE, H 128, asm": {"cap_spill_bytes": 527},
    "nuq3, before RoPE, H 128, asm": {"cap_instructions": 5.24, "min_share": 0.5},
    "nuq2-1%, before RoPE, H 128, asm": {"cap_instructions": 5.33, "cap_spill_bytes": 281},
    "nuq3-1%, before RoPE, H 128, asm": {"cap_instructions": 6.08, "cap_spill_bytes": 718},
    "polar 4+4, groups of 128, exact values, H 128, asm": {"cap_alu": 1.3},
    "polar 4+4, groups of 128, exact values, H 128, jnp": {"cap_alu": 1.92},
    "polar 4+4, groups of 32, exact values, H 128, asm": {"cap_alu": 1.28},
    "polar 4+2, groups of 64, exact values, H 128, asm": {"cap_alu": 1.47},
    "polar 4+2, groups of 64, exact values, H 128, jnp": {"cap_alu": 2.59},
    "polar 4+4, groups of 128, exact values, H 256, asm": {"cap_alu": 1.41},
    "polar 4+4, groups of 128, exact values, H 256, jnp": {"cap_alu": 2.26},
    "p V, innerq 2-bit sym, H 128, asm": {"plain_loads_allowed": True},
    "p V, innerq 2-bit asym, H 128, asm": {"plain_loads_allowed": True},
    "p V, innerq 2-bit asym, H 128, jnp": {"plain_loads_allowed": True},
    "p V, kivi 2-bit, H 128, asm": {"plain_loads_allowed": True},
    "p V, kivi 4-bit, H 128, asm": {"plain_loads_allowed": True},
}
Stored = tuple[
    Reader, list[jax.ShapeDtypeStruct], float
]  # reader, stored arrays, stored bits of one element


def _uniform(format: GroupFormat | None, channels: int) -> Stored:
    """Return groups of uniform codes, or unquantized rows."""
    if format is None:
        reader, stored = (
            dense(channels, "bfloat16"),
            [jax.ShapeDtypeStruct((BATCH, KV_HEADS, TOKENS, channels), jnp.uint16)],
        )
    else:
        reader = grouped(GroupedCodec("k", format))
        stored = [
            leaf.struct
            for leaf in jax.tree.leaves(grouped_array.specs(format, BATCH, KV_HEADS, TOKENS))
        ]
    assert isinstance(reader, Reader), reader
    stored_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in stored)
    return reader, stored, 8 * stored_bytes / (BATCH * KV_HEADS * TOKENS * channels)


def _tables(
    bits: int,
    channels: int,
    group: ChannelGroup | None,
    pool: Pool | None = None,
    pre_rope: bool = False,
) -> Stored:
    """Return codes of a codebook, as `kernel_readers.nonuniform` describes them; arrays that all
    tokens share are not counted as stored."""
    layout = plane_layout(bits, channels, 32)
    reader = nonuniform(layout, group, pool=pool.tokens if pool else 0, pre_rope=pre_rope)
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
    stored_bytes = sum(
        math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes if len(shape) > 2
    )
    shapes += [((channels // 2,), jnp.float32), ((), jnp.float32)] if pre_rope else []
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return reader, structs, 8 * stored_bytes / (BATCH * KV_HEADS * TOKENS * channels)


def _before_rope(format: GroupFormat, channels: int) -> Stored:
    reader, stored, bits = _uniform(format, channels)
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


def _runs(widths: str, channels: int, *, keys: bool) -> Stored:
    """Return keys before RoPE or values in chunks of these widths, a digit for each."""
    chunk = channels // len(widths)
    runs = [
        (int(width), chunk * len(list(same)))
        for width, same in itertools.groupby(widths)
        if width != "0"
    ]
    layouts = [run_layout(width, of_run, 32) for width, of_run in runs]
    reader = kernel_readers.runs(layouts, channels, pre_rope=keys)
    assert isinstance(reader, Reader), reader
    f, row = jnp.float32, (KV_HEADS, channels)
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((BATCH, KV_HEADS, TOKENS // layout.slots, layout.words(bits)), jnp.int16)
        for layout in layouts
        for bits in layout.sets
    ]
    shapes.append(((BATCH, KV_HEADS, TOKENS), jnp.int8))
    stored_bytes = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes)
    of_keys = [(row, jnp.int32), (row, f), (row, f), ((channels // 2,), f), ((), f)]
    shapes += [((8,), f), *(of_keys if keys else [((*row, channels), f), (row, f)])]
    return (
        reader,
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        8 * stored_bytes / (BATCH * KV_HEADS * TOKENS * channels),
    )


def attention_case(
    name: str, k: GroupFormat | None, v: GroupFormat | None, channels: int, **limits: Any
) -> Case:
    """Return decode attention with these formats (None: unquantized rows in bfloat16), tuned as it
    runs."""
    return _attention(name, _uniform(k, channels), _uniform(v, channels), channels, **limits)


def _attention(
    name: str,
    k: Stored,
    v: Stored,
    channels: int,
    *,
    arithmetic: Arithmetic = "asm",
    queries: int = GROUP,
    **limits: Any,
) -> Case:
    """Return decode attention over these arrays. queries: query heads of each KV head."""
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


def _formats(
    bits: int, scheme: Scheme, axes: tuple[GroupedAxis, GroupedAxis], channels: int
) -> tuple[GroupFormat, GroupFormat]:
    k, v = (GroupFormat(bits, scheme, axis, 32, channels, 32) for axis in axes)
    return k, v


def _innerq(bits: int, scheme: Scheme, channels: int, **limits: Any) -> Case:
    """Return InnerQ's case; `bits` of a code include the sign."""
    magnitude = bits - (scheme != "asym")
    return attention_case(
        f"innerq, {bits}-bit {scheme}",
        *_formats(magnitude, scheme, INNER, channels),
        channels,
        **limits,
    )


def _kivi(bits: int, channels: int, **limits: Any) -> Case:
    return attention_case(
        f"kivi, {bits}-bit", *_formats(bits, "asym", OUTER, channels), channels, **limits
    )


def _kivi_before_rope(arithmetic: Arithmetic, **limits: Any) -> Case:
    k, v = _formats(4, "asym", OUTER, 128)
    return _attention(
        "kivi, 4-bit, before RoPE",
        _before_rope(k, 128),
        _uniform(v, 128),
        128,
        arithmetic=arithmetic,
        **limits,
    )


def _nuq(bits: int, percent: int, channels: int, pre_rope: bool = True, **limits: Any) -> Case:
    """Return KVQuant's case: keys with scales of channels, values with scales of whole tokens;
    outliers as its paper counts them."""
    pools: tuple[Pool | None, ...] = None, None
    if percent:
        slots = 2 * outliers_per_side(percent / 100, KV_HEADS * channels)
        pools = (
            pool_of(32, slots * KVQuant().slots, channels, False),
            pool_of(32, slots, channels, False),
        )  # no kernel reads the counts
    k = _tables(bits, channels, None, pools[0], pre_rope)
    v = _tables(bits, channels, ChannelGroup(KV_HEADS, channels), pools[1])
    name = f"nuq{bits}{f'-{percent}%' if percent else ''}, {'before' if pre_rope else 'after'} RoPE"
    return _attention(name, k, v, channels, **limits)


def _waterfill(
    bits: str,
    k_widths: str,
    v_widths: str,
    channels: int,
    arithmetic: Arithmetic = "asm",
    **limits: Any,
) -> Case:
    """Return waterfill's case, with the widths that `waterfill:bits=` has by itself."""
    k, v = _runs(k_widths, channels, keys=True), _runs(v_widths, channels, keys=False)
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
    return _attention(
        f"waterfill, {bits} bits",
        k,
        v,
        channels,
        arithmetic=arithmetic,
        mma_columns=columns,
        **limits,
    )


def _products(
    name: str,
    formats: tuple[GroupFormat, GroupFormat],
    channels: int,
    of_scores: Limits,
    of_values: Limits,
    arithmetic: Arithmetic = "asm",
) -> tuple[Case, Case]:
    """Return the two matrix-vector products by themselves: q K^T, p V."""
    (k_reader, k_stored, k_bits), (v_reader, v_stored, v_bits) = (
        _uniform(format, channels) for format in formats
    )
    launch = Launch(arithmetic)

    def scores() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        q = jax.ShapeDtypeStruct((BATCH, KV_HEADS, GROUP, channels), jnp.float32)
        return lambda q, stored: matvec.scores(
            q, k_reader, stored, capacity=TOKENS, launch=launch
        ), (q, k_stored)

    def values() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        p = jax.ShapeDtypeStruct((BATCH, KV_HEADS, GROUP, TOKENS), jnp.float32)
        return lambda p, stored: matvec.weighted_values(p, v_reader, stored, launch=launch), (
            p,
            v_stored,
        )

    k_elements, v_elements = (
        tuning.tile * channels for tuning in (matvec.scores_tuning(k_reader, TOKENS), TUNING)
    )
    return (
        Case(
            f"q K^T, {name}, H {channels}, {arithmetic}",
            scores,
            "matvec_scores",
            k_elements,
            k_bits,
            **of_scores,
        ),
        Case(
            f"p V, {name}, H {channels}, {arithmetic}",
            values,
            "matvec_values",
            v_elements,
            v_bits,
            **of_values,
        ),
    )


def _limits(instructions: float, alu: float, share: float, *, waits: bool = False) -> Limits:
    """Return the limits. waits: small loads in the loop, of two bytes a lane, are not asynchronous:
    scales of tokens in short steps."""
    return {
        "cap_instructions": instructions,
        "cap_alu": alu,
        "min_share": share,
        "plain_loads_allowed": waits,
    }


def _slow(instructions: float, alu: float, share: float, spill_bytes: int = 64) -> Limits:
    """Return the limits of a kernel that is bound by its instructions; small loads wait: the scales
    of tokens, and cosines that the first level of the cache holds. Bytes are spilled where a table,
    or rotated queries, and the sums do not fit the registers together.
    """
    return _limits(instructions, alu, share, waits=True) | {
        "loop_spills_allowed": True,
        "cap_spill_bytes": spill_bytes,
    }


# Caps are 8 % above the larger count of the two targets with JAX 0.10.2 and ptxas 13.5: counts move
# with the compiler.
CASES: tuple[Case, ...] = (
    _innerq(2, "sym", 128, **_limits(2.07, 0.83, 0.95) | {"cap_spill_bytes": 126}),
    _innerq(2, "sym", 64, **_limits(2.4, 0.89, 0.9)),
    _innerq(2, "sym", 256, **_limits(1.99, 0.78, 0.95)),
    _innerq(2, "sym", 128, queries=16, **_slow(2.99, 0.95, 0.72)),
    _innerq(2, "asym", 128, **_limits(2.35, 0.85, 0.95)),
    _innerq(
        3,
        "sym",
        128,
        **_limits(2.77, 1.48, 0.9) | {"loop_spills_allowed": True, "cap_spill_bytes": 385},
    ),
    _innerq(3, "sym", 64, **_limits(3.13, 1.56, 0.9, waits=True)),
    _innerq(3, "hybrid", 128, **_limits(3.5, 1.61, 0.9, waits=True)),
    _innerq(3, "hybrid", 64, **_limits(3.45, 1.57, 0.95, waits=True)),
    _innerq(4, "sym", 128, **_limits(2.07, 0.83, 1.0) | {"cap_spill_bytes": 83}),
    _innerq(4, "hybrid", 128, **_limits(2.49, 0.87, 1.0)),
    _innerq(5, "sym", 128, **_limits(3.33, 1.75, 1.0, waits=True)),
    _innerq(5, "hybrid", 128, **_limits(3.77, 1.81, 1.0, waits=True)),
    _innerq(8, "asym", 64, **_limits(3.15, 1.19, 1.0)),
    _innerq(8, "asym", 128, **_limits(3.17, 1.16, 1.0)),
    _innerq(8, "sym", 128, **_limits(2.85, 1.21, 1.0)),
    _innerq(8, "hybrid", 128, **_limits(3.17, 1.16, 1.0)),
    _kivi(2, 128, **_limits(2.46, 0.83, 0.9)),
    _kivi(2, 64, **_limits(2.76, 0.91, 0.8)),
    _kivi(2, 256, **_limits(2.38, 0.79, 0.9)),
    _kivi(3, 128, **_limits(4.37, 2.35, 0.73, waits=True)),
    _kivi(4, 128, **_limits(2.62, 0.88, 1.0)),
    _kivi(4, 64, **_limits(2.81, 0.95, 1.0)),
    _kivi(4, 256, **_limits(2.89, 0.94, 1.0, waits=True)),
    _kivi(8, 128, **_limits(3.12, 1.29, 1.0)),
    _kivi(4, 128, queries=16, **_limits(3.69, 1.01, 0.95, waits=True)),
    _kivi_before_rope("asm", **_slow(4.13, 0.98, 0.9, 281)),
    _nuq(2, 0, 128, pre_rope=False, **_slow(2.81, 1.72, 0.5)),
    _nuq(3, 0, 128, pre_rope=False, **_slow(3.28, 1.99, 0.65)),
    _nuq(4, 0, 128, pre_rope=False, **_slow(4.3, 3.19, 0.54, 108)),
    _nuq(3, 0, 128, **_slow(4.75, 2.35, 0.54, 653)),
    _nuq(2, 1, 128, **_slow(4.77, 2.13, 0.43, 221)),
    _nuq(3, 1, 128, **_slow(5.35, 2.51, 0.54, 590)),
    _nuq(4, 1, 128, **_slow(7.06, 3.81, 0.49)),
    _attention(
        "nf4, groups of 64",
        _tables(4, 128, ChannelGroup(1, 64)),
        _tables(4, 128, ChannelGroup(1, 64)),
        128,
        **_slow(5.13, 3.36, 0.57, 415),
    ),
    _waterfill("2.5", "54332210", "54332110", 128, **_slow(6.66, 2.59, 0.32)),
    _waterfill("4", "65544332", "65544322", 128, **_slow(8.0, 3.45, 0.43)),
    _waterfill("2.5", "54332110", "54332110", 64, **_slow(9.33, 3.73, 0.23)),
    _waterfill("4", "65544322", "65544322", 64, **_slow(10.64, 4.81, 0.32)),
    attention_case("dense, bf16", None, None, 128, **_limits(1.4, 0.5, 1.0)),
    # What runs where nothing else is chosen.
    _innerq(2, "sym", 128, arithmetic="jnp", **_slow(2.46, 0.91, 0.89, 186)),
    _innerq(
        2,
        "asym",
        128,
        arithmetic="jnp",
        **_limits(3.16, 0.92, 0.81) | {"loop_spills_allowed": True, "cap_spill_bytes": 144},
    ),
    _innerq(3, "hybrid", 128, arithmetic="jnp", **_limits(4.34, 1.77, 0.79, waits=True)),
    _innerq(
        4,
        "sym",
        128,
        arithmetic="jnp",
        **_limits(2.59, 0.98, 1.0) | {"loop_spills_allowed": True, "cap_spill_bytes": 368},
    ),
    _innerq(4, "hybrid", 128, arithmetic="jnp", **_limits(3.51, 1.08, 1.0)),
    _kivi(2, 128, arithmetic="jnp", **_limits(3.55, 1.08, 0.75)),
    _kivi(4, 128, arithmetic="jnp", **_limits(4.68, 1.98, 1.0)),
    _kivi_before_rope("jnp", **_limits(9.0, 3.94, 0.47, waits=True)),
    _nuq(4, 0, 128, pre_rope=False, arithmetic="jnp", **_limits(16.03, 14.64, 0.11, waits=True)),
    _waterfill("2.5", "54332210", "54332110", 128, "jnp", **_slow(9.53, 3.78, 0.22)),
    attention_case("dense, bf16", None, None, 128, arithmetic="jnp", **_limits(1.4, 0.5, 1.0)),
    *_products(
        "innerq 2-bit sym",
        _formats(1, "sym", INNER, 128),
        128,
        _limits(2.03, 1.1, 1.0, waits=True),
        _limits(2.22, 1.1, 1.0),
    ),
    *_products(
        "innerq 2-bit asym",
        _formats(2, "asym", INNER, 128),
        128,
        _limits(2.42, 0.87, 1.0, waits=True),
        _limits(2.28, 0.84, 1.0),
    ),
    *_products(
        "kivi 2-bit",
        _formats(2, "asym", OUTER, 128),
        128,
        _slow(2.93, 0.96, 0.94, 286),
        _limits(2.24, 0.82, 1.0),
    ),
    *_products(
        "innerq 2-bit asym",
        _formats(2, "asym", INNER, 128),
        128,
        _limits(2.68, 0.89, 0.96, waits=True),
        _limits(3.07, 1.13, 0.84),
        "jnp",
    ),
    *_products(
        "kivi 2-bit",
        _formats(2, "asym", OUTER, 128),
        128,
        _slow(3.54, 1.11, 0.73),
        _slow(3.01, 0.99, 0.86),
        "jnp",
    ),
    *_products(
        "kivi 4-bit",
        _formats(4, "asym", OUTER, 128),
        128,
        _limits(2.68, 1.1, 1.0),
        _limits(2.32, 1.1, 1.0),
    ),
)
