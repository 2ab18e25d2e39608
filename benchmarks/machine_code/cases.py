"""The kernels whose machine code is watched, and what it may cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.report import KernelReport, measure
from benchmarks.machine_code.target import Target
from kvq_jax import quantized
from kvq_jax.attention.kernel_sides import dense, grouped, nonuniform, rotated
from kvq_jax.group_codec import GroupCodec
from kvq_jax.groups import ChannelGroup
from kvq_jax.packing import plane_layout
from kvq_jax.quantized import Axis, GroupFormat, Scheme
from pallas_kernels import matvec
from pallas_kernels._launch import Launch
from pallas_kernels.decode import TUNING, decode_attention, tuning_for
from pallas_kernels.sides import Side


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and its limits, which hold on every target.

    build: makes the function to compile and its arguments, trees of jax.ShapeDtypeStruct. kernel: a regular expression for the whole name
    of the kernel in it. elements_per_iteration: cached elements that a block reads in one iteration of the main loop, K and V together.
    stored_bits: of one cached element, with scales and zero points. cap_instructions, cap_alu: per cached element. min_share: of the memory
    limit, as predicted. mma_columns: query heads, padded, that each cached element is multiplied with; None where a warp repeats work.
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
    mma_columns: int | None = 8

    def measure(self, target: Target) -> KernelReport:
        """Compiles the case: seconds."""
        function, arguments = self.build()
        kernel = compile_for(target, function, arguments).kernel(self.kernel)
        return measure(self.name, kernel, target, elements_per_iteration=self.elements_per_iteration, stored_bits=self.stored_bits)

    def failures(self, report: KernelReport) -> list[str]:
        """What of a report breaks a limit, in words."""
        instructions, alu, columns = report.instructions_per_element, report.alu_per_element, report.mma_columns
        checks = (
            (f"{instructions:.2f} instructions per element, at most {self.cap_instructions}", instructions > self.cap_instructions),
            (f"{alu:.2f} integer operations and conversions per element, at most {self.cap_alu}", alu > self.cap_alu),
            (f"{report.share:.0%} of the memory limit, at least {self.min_share:.0%}", report.share < self.min_share),
            (f"{report.plain_loads} loads in the loop that are not asynchronous", report.plain_loads and not self.plain_loads_allowed),
            (f"{report.loop_spills} spills in the loop", report.loop_spills and not self.loop_spills_allowed),
            (
                f"{columns:g} multiply-adds per element, not {self.mma_columns}: is {self.elements_per_iteration=} what the loop reads?",
                self.mma_columns is not None and columns != self.mma_columns,
            ),
        )
        return [f"{self.name} on {report.target}: {line}" for line, broken in checks if broken]


BATCH, KV_HEADS, GROUP, TOKENS = 16, 8, 4, 16384  # Llama 3.1 8B
Stored = tuple[Side, list[jax.ShapeDtypeStruct], float]  # side, stored arrays, stored bits of one element


def _side(format: GroupFormat | None, channels: int) -> Stored:
    """Groups of uniform codes, or exact rows."""
    if format is None:
        side, stored = dense(channels, "bfloat16"), [jax.ShapeDtypeStruct((BATCH, KV_HEADS, TOKENS, channels), jnp.uint16)]
    else:
        side = grouped(GroupCodec("k", format))
        stored = [leaf.struct for leaf in jax.tree.leaves(quantized.leaves(format, BATCH, KV_HEADS, TOKENS))]
    assert isinstance(side, Side), side
    stored_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in stored)
    return side, stored, 8 * stored_bytes / (BATCH * KV_HEADS * TOKENS * channels)


def _tables(bits: int, channels: int, group: ChannelGroup | None, slots: int = 0, pre_rope: bool = False) -> Stored:
    """Codes of a table, as `kernel_sides.nonuniform` describes them; what all tokens share is not counted as stored."""
    layout = plane_layout(bits, channels, 32)
    side = nonuniform(layout, group, slots=slots, pre_rope=pre_rope)
    assert isinstance(side, Side), side
    words = [(BATCH, KV_HEADS, TOKENS // layout.slots, layout.words(b)) for b in layout.sets]
    shapes: list[tuple[tuple[int, ...], Any]] = [(shape, jnp.int16) for shape in words]
    shapes.append(((1 << bits,), jnp.float32))
    shapes += 2 * [((KV_HEADS, channels), jnp.float32) if group is None else (group.shape(BATCH, KV_HEADS, TOKENS, channels), jnp.uint16)]
    shapes += [((BATCH, slots, TOKENS), jnp.uint16)] * 2 if slots else []
    stored_bytes = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes if len(shape) > 2)
    shapes += [((channels // 2,), jnp.float32), ((), jnp.float32)] if pre_rope else []
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return side, structs, 8 * stored_bytes / (BATCH * KV_HEADS * TOKENS * channels)


def _before_rope(format: GroupFormat, channels: int) -> Stored:
    side, stored, bits = _side(format, channels)
    turned = rotated(side)
    assert isinstance(turned, Side), turned
    return turned, [*stored, jax.ShapeDtypeStruct((channels // 2,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)], bits


def attention_case(name: str, k: GroupFormat | None, v: GroupFormat | None, channels: int, **limits: Any) -> Case:
    """Decode attention with these formats (None: exact rows in bfloat16), in assembly, tuned as it runs."""
    return _attention(name, _side(k, channels), _side(v, channels), channels, **limits)


def _attention(name: str, k: Stored, v: Stored, channels: int, **limits: Any) -> Case:
    (k_side, k_stored, k_bits), (v_side, v_stored, v_bits) = k, v
    tuning = tuning_for(k_side, v_side, channels, 8, TOKENS)

    def build() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        def attend(q: jax.Array, keys: list[jax.Array], values: list[jax.Array], limits: jax.Array) -> Any:
            return decode_attention(q, (k_side, keys), (v_side, values), limits, capacity=TOKENS, how=Launch("asm"))

        q = jax.ShapeDtypeStruct((BATCH, KV_HEADS, GROUP, channels), jnp.float32)
        return attend, (q, k_stored, v_stored, jax.ShapeDtypeStruct((BATCH,), jnp.int32))

    elements = tuning.tile * 2 * channels
    return Case(name, build, "decode_attention", elements, (k_bits + v_bits) / 2, **limits)


def _innerq(bits: int, scheme: Scheme, channels: int, **limits: Any) -> Case:
    """`bits` of a code, the sign included."""
    magnitude = bits - (scheme != "asym")
    k, v = (GroupFormat(magnitude, scheme, axis, 32, channels, 32) for axis in ("channels", "tokens"))
    return attention_case(f"innerq, {bits}-bit {scheme}, H {channels}", k, v, channels, **limits)


def _kivi(bits: int, channels: int, **limits: Any) -> Case:
    k, v = (GroupFormat(bits, "asym", axis, 32, channels, 32) for axis in ("tokens", "channels"))
    return attention_case(f"kivi, {bits}-bit, H {channels}", k, v, channels, **limits)


def _nuq(bits: int, percent: int, channels: int, pre_rope: bool = True, **limits: Any) -> Case:
    """KVQuant: keys with scales of channels, values with scales of whole tokens; outliers as its paper counts them."""
    slots = 2 * (1 + int((KV_HEADS * channels - 1) * percent / 200)) if percent else 0
    k, v = _tables(bits, channels, None, slots, pre_rope), _tables(bits, channels, ChannelGroup(KV_HEADS, channels), slots)
    name = f"nuq{bits}{f'-{percent}%' if percent else ''}, {'before' if pre_rope else 'after'} RoPE, H {channels}"
    return _attention(name, k, v, channels, **limits)


def _products(name: str, k: GroupFormat, v: GroupFormat, channels: int, caps: tuple[float, float]) -> tuple[Case, Case]:
    """The two matrix-vector products by themselves; caps: instructions per element of q K^T and of p V."""
    (k_side, k_stored, k_bits), (v_side, v_stored, v_bits) = _side(k, channels), _side(v, channels)
    how = Launch("asm")

    def scores() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        q = jax.ShapeDtypeStruct((BATCH, KV_HEADS, GROUP, channels), jnp.float32)
        return lambda q, stored: matvec.scores(q, k_side, stored, capacity=TOKENS, how=how), (q, k_stored)

    def values() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        p = jax.ShapeDtypeStruct((BATCH, KV_HEADS, GROUP, TOKENS), jnp.float32)
        return lambda p, stored: matvec.weighted_values(p, v_side, stored, how=how), (p, v_stored)

    of_scores, of_values = (tuning.tile * channels for tuning in (matvec.SCORES_TUNING, TUNING))
    return (
        Case(f"q K^T, {name}, H {channels}", scores, "matvec_scores", of_scores, k_bits, caps[0], 1.1, 1.0, plain_loads_allowed=True),
        Case(f"p V, {name}, H {channels}", values, "matvec_values", of_values, v_bits, caps[1], 1.1, 1.0),
    )


def _formats(bits: int, scheme: Scheme, axes: tuple[Axis, Axis], channels: int) -> tuple[GroupFormat, GroupFormat]:
    k, v = (GroupFormat(bits, scheme, axis, 32, channels, 32) for axis in axes)
    return k, v


def _slow(instructions: float, alu: float, share: float) -> dict[str, Any]:
    """Limits of a kernel that is bound by its instructions; small loads wait: the statistics of tokens, and cosines that the first level of
    the cache holds."""
    return {
        "cap_instructions": instructions,
        "cap_alu": alu,
        "min_share": share,
        "plain_loads_allowed": True,
        "loop_spills_allowed": True,
    }


# Caps are 8 % above what was counted with JAX 0.10.2 and ptxas 13.5: counts move with the compiler.
CASES: tuple[Case, ...] = (
    _innerq(2, "sym", 128, cap_instructions=2.07, cap_alu=0.83, min_share=0.95),
    _innerq(2, "sym", 64, cap_instructions=2.4, cap_alu=0.89, min_share=0.9),
    _innerq(2, "asym", 128, cap_instructions=2.35, cap_alu=0.85, min_share=0.95),
    _innerq(3, "sym", 128, cap_instructions=2.77, cap_alu=1.48, min_share=0.9),
    _innerq(3, "hybrid", 128, cap_instructions=3.5, cap_alu=1.61, min_share=0.9, plain_loads_allowed=True),
    _innerq(4, "sym", 128, cap_instructions=2.07, min_share=1.0, cap_alu=0.83),
    _innerq(8, "asym", 128, cap_instructions=2.8, min_share=1.0, cap_alu=1.0),
    _kivi(2, 128, cap_instructions=2.46, cap_alu=0.83, min_share=0.9),
    _kivi(2, 64, cap_instructions=2.76, cap_alu=0.91, min_share=0.8),
    _kivi(4, 128, cap_instructions=2.62, min_share=1.0, cap_alu=0.88),
    _kivi(4, 64, cap_instructions=2.81, min_share=1.0, cap_alu=0.95),
    _attention(
        "kivi, 4-bit, before RoPE, H 128",
        _before_rope(GroupFormat(4, "asym", "tokens", 32, 128, 32), 128),
        _side(GroupFormat(4, "asym", "channels", 32, 128, 32), 128),
        128,
        **_slow(4.13, 0.98, 0.9),
    ),
    _nuq(2, 0, 128, pre_rope=False, **_slow(2.81, 1.72, 0.5)),
    _nuq(3, 0, 128, pre_rope=False, **_slow(3.28, 1.99, 0.65)),
    _nuq(4, 0, 128, pre_rope=False, **_slow(4.3, 3.19, 0.54)),
    _nuq(3, 0, 128, **_slow(4.75, 2.35, 0.54)),
    _nuq(2, 1, 128, **_slow(4.77, 2.13, 0.43)),
    _nuq(3, 1, 128, **_slow(5.35, 2.51, 0.54)),
    _nuq(4, 1, 128, **_slow(7.06, 3.81, 0.49)),
    _attention(
        "nf4, groups of 64, H 128",
        _tables(4, 128, ChannelGroup(1, 64)),
        _tables(4, 128, ChannelGroup(1, 64)),
        128,
        **_slow(5.13, 3.36, 0.57),
    ),
    attention_case("dense, bf16, H 128", None, None, 128, cap_instructions=1.4, min_share=1.0, cap_alu=0.5),
    *_products("innerq 2-bit sym", *_formats(1, "sym", ("channels", "tokens"), 128), 128, (2.03, 2.22)),
    *_products("kivi 4-bit", *_formats(4, "asym", ("tokens", "channels"), 128), 128, (2.68, 2.32)),
)
