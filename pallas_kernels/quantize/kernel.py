"""Quantize and pack: turn full-precision rows into words, scales and zero points, in one kernel
that reads the rows from memory once.

    u = clip(round((x - zero) / scale), 0, top),    x ~ u * scale + zero

    asym    zero = min, scale = (max - min) / m, top = m                          m = 2^bits - 1
    sym     scale = max|x| / m, zero = -m * scale, top = 2m
    hybrid  for each group, whichever has the smaller L1 error; ties to asym

These are the equations of `kvq_jax.arrays.uniform`, which also describes their behaviour on
non-finite, constant and huge entries. The layout of the words is in tiles/layout.py. The resulting
arrays are the same as from `kvq_jax.arrays.grouped_array.quantize`.

Exactness. Scales and zero points are equal to 1 ulp of the stored dtype. Codes differ by one if x /
scale lies within 2^(code bits - 21) of a tie, which is less than 1e-4 of them. A GPU divides
approximately, and inputs of 16 bits hit ties often. So a quotient is first rounded to a multiple of
2^(code bits - 21), which turns a near tie into a tie, and then half to even. This takes two
additions of constants, no division and no conversion. The code is in the low mantissa bits of the
sum.

Cost, in fp32 operations per element (a fused multiply-add in asm counts once), next to bytes, for
16-bit rows:

                                                   sym             hybrid,         hybrid,
                                                                   over channels   over tokens
    convert, range, finite                         4               4               6
    codes: subtract, multiply, add, clip 2, add    6 (asm 5)       12 (10)         18 (15)
    errors: level, dequantize 2, subtract, add     0               10 (8)          10 (8)
    choose, pack (3 and 5 bits: 2 more)            2               3               2
    all                                            12 (11)         29 (25)         36 (31)
    bytes: rows 2 + codes + scale and zero / 32    2.44 (3 bits)   2.50            2.50

So hybrid moves 2 to 3 % more bytes than sym (half of a stored pair) and computes 2.4 to 3 times as
much. Machine code for an H200, with reductions and addresses, over channels at H 128, 3-bit codes,
jnp, has 17.6 instructions per element for sym and 36.7 for hybrid. At its memory's speed the device
has time for about 17, so sym is bound by memory and hybrid by arithmetic. (Compiled and counted,
not timed.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int16

from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.rounding import (
    Job,
    Quantizer,
    Scheme,
    cleaned,
    finite_or,
    fold,
    is_plain,
    within_limit,
)
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN, SUPPORTED_BITS, PlaneLayout
from pallas_kernels.triton_call import triton_call, whole_array_but

_AT_ONCE = 4  # tokens that one loop step over a group reads


class Packed(NamedTuple):
    """Quantized rows.

    words: int16 [B, K, T / slots, tiles * W] of each plane set. scale, zero: [B, K, H / group, T]
    over channels, [B, K, T / group, H] over tokens. zero is None if the reader takes none.
    """

    words: tuple[Int16[Array, "B K rows words"], ...]
    scale: Float[Array, "B K groups rest"]
    zero: Float[Array, "B K groups rest"] | None


@dataclasses.dataclass(frozen=True)
class QuantizeTuning:
    """Parameters that change only the speed.

    Args:
        warp_channels: channels of a span per warp of a program, if groups run over channels.
        row: elements of the token rows that a program of one warp quantizes side by side, if groups
            run over tokens.
    """

    warp_channels: int = 128
    row: int = 512


QUANTIZE_TUNING = QuantizeTuning()


def quantize_rows(
    rows: Float[Array, "B K T H"],
    reader: GroupedReader,
    scheme: Scheme,
    bits: int,
    *,
    divisor: Float[Array, "B K 1 H"] | None = None,
    tuning: QuantizeTuning = QUANTIZE_TUNING,
    launch: Launch = LAUNCH,
) -> Packed:
    """Quantize rows / divisor and pack them as `reader` reads them.

    Equations, exactness and cost are in the module's docstring.

    Args:
        rows: float32, bfloat16 or float16, T a multiple of 32 (and of the group, if groups run over
            tokens), H the reader's channels.
        reader: one with zero points takes every scheme. One without (centre = 2^bits - 1) takes
            only sym. Groups over channels are whole chunks of the planes, groups over tokens whole
            spans.
        scheme: "asym", "sym" or "hybrid".
        bits: as the scheme counts them, so sym and hybrid codes take bits + 1.
        divisor: fp32, finite and not 0. Rows are multiplied by its reciprocal.
        tuning: changes only the speed.
        launch: how the kernel is launched.

    Raises ValueError if the rows and the reader do not fit together.
    """
    check_format(rows, reader, scheme, bits)
    batch, heads, tokens, channels = rows.shape
    p, group = reader.layout, reader.group
    dtype = jnp.dtype(reader.scale_dtype)
    over_tokens = reader.axis == "tokens"
    count = tokens // (group if over_tokens else SPAN)
    spans = _largest_power_of_two(count, max(1, tuning.row // channels)) if over_tokens else 1

    def cut(size: int, per: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Describe an array [..., size / per, per, width] if a program has several groups of
        tokens, else [..., size, width].
        """
        shape = (size // per, per, width) if over_tokens else (size, width)
        return jax.ShapeDtypeStruct((batch, heads, *shape), dtype)

    unit = group if over_tokens else SPAN
    source = rows.reshape(cut(tokens, group, channels, rows.dtype).shape)
    words = [
        cut(tokens // p.slots, unit // p.slots, p.tiles(b) * p.width, jnp.int16) for b in p.sets
    ]
    scale = jax.ShapeDtypeStruct(
        (batch, heads, *((count, channels) if over_tokens else (channels // group, tokens))), dtype
    )
    scales = [scale] * (1 if reader.centre is not None else 2)

    def token_block(array: Any) -> pl.BlockSpec:
        block = (
            (spans, *array.shape[3:]) if over_tokens else (array.shape[2] // count, array.shape[3])
        )
        return pl.BlockSpec(
            (None, None, *block), lambda b, k, s: (b, k, s, *[0] * (len(block) - 1))
        )

    def scale_block(array: Any) -> pl.BlockSpec:
        if over_tokens:
            return token_block(array)
        return pl.BlockSpec((None, None, channels // group, SPAN), lambda b, k, s: (b, k, 0, s))

    inputs = [source] if divisor is None else [source, divisor.astype(jnp.float32)]
    job = Job(reader, scheme, bits, divisor is not None, spans, launch.asm)
    outputs = triton_call(
        functools.partial(token_kernel if over_tokens else channel_kernel, job=job),
        name=f"quantize_{scheme}_{reader.axis}",
        grid=(batch, heads, count // spans),
        in_specs=[
            token_block(source),
            *(whole_array_but(2, array, (0, 1)) for array in inputs[1:]),
        ],
        out_specs=[*map(token_block, words), *map(scale_block, scales)],
        out_shape=[*words, *scales],
        launch=launch,
        num_warps=1 if over_tokens else pl.next_power_of_2(pl.cdiv(channels, tuning.warp_channels)),
        num_stages=1,
    )(*inputs)
    sets = len(words)
    flat = tuple(w.reshape(batch, heads, tokens // p.slots, -1) for w in outputs[:sets])
    return Packed(flat, outputs[sets], outputs[sets + 1] if len(scales) == 2 else None)


def check_format(rows: Array, reader: GroupedReader, scheme: Scheme, bits: int) -> None:
    p, (tokens, channels) = reader.layout, rows.shape[2:]
    if scheme not in ("asym", "sym", "hybrid"):
        raise ValueError(f"{scheme=}: choose 'asym', 'sym' or 'hybrid'")
    if p.bits not in SUPPORTED_BITS or (bits if scheme == "asym" else bits + 1) > p.bits:
        raise ValueError(
            f"{scheme=} with {bits=} does not fit codes of {p.bits} bits (kernels pack"
            f" {SUPPORTED_BITS} bits)"
        )
    if reader.centre is not None and (scheme != "sym" or reader.centre != 2**bits - 1):
        raise ValueError(
            f"a reader without zero points (centre={reader.centre}) takes only scheme='sym' "
            f"with bits={(reader.centre + 1).bit_length() - 1}"
        )
    if channels != p.channels or p.chunks * p.width != channels:
        raise ValueError(
            f"rows of {channels} channels do not fill {p.chunks} chunks of {p.width} channels: use"
            " the XLA path"
        )
    grouped, whole, size = (
        ("channels", p.width, channels) if reader.axis == "channels" else ("tokens", SPAN, tokens)
    )
    if reader.group % whole or size % reader.group:
        raise ValueError(
            f"groups of {reader.group} {grouped} must be a multiple of {whole} and divide {size}"
        )
    if tokens % SPAN or not tokens:
        raise ValueError(f"{tokens} tokens are not a positive multiple of {SPAN}")


def _largest_power_of_two(divides: int, up_to: int) -> int:
    return min(divides & -divides, 1 << (up_to.bit_length() - 1))


class _WordWriter:
    """Fills the words of one row of tiles code by code, and stores each word once it is full."""

    def __init__(self, layout: PlaneLayout, store: Callable[[int, int, Array], None]):
        """Keep `store`, which is called with (plane set, tile, int16 words)."""
        self._layout, self._store = layout, store
        self._words: dict[tuple[int, int], tuple[Array, int]] = {}

    def add(self, slot: int, chunk: int, level: Array) -> None:
        """Add the codes of a chunk of a token slot, in the form of `Job.levels`."""
        p, field = self._layout, self._layout.field(slot, chunk)
        bits = lax.bitcast_convert_type(level, jnp.int32)
        low = p.sets[0]
        self._put(
            0,
            field.tile,
            bits,
            field.shift + field.position,
            ((1 << low) - 1) if len(p.sets) == 2 else None,
        )
        if field.high_tile is not None:
            self._put(1, field.high_tile, bits, field.high_shift + field.position, 1 << low)

    def _put(self, plane_set: int, tile: int, bits: Array, shift: int, mask: int | None) -> None:
        # Bits above the 16 of a word are dropped at the end.
        moved = (
            bits << shift
            if shift >= 0
            else lax.shift_right_logical(bits, jnp.full((), -shift, jnp.int32))
        )
        if mask is not None:
            moved = moved & np.int32(mask << shift if shift >= 0 else mask >> -shift)
        word, count = self._words.pop((plane_set, tile), (None, 0))
        word = moved if word is None else word | moved
        if count + 1 == 16 // self._layout.sets[plane_set]:
            self._store(plane_set, tile, word.astype(jnp.int16))
        else:
            self._words[plane_set, tile] = word, count + 1


def _open(refs: Sequence[Any], job: Job) -> tuple[Any, Any, Sequence[Any], Any, Any]:
    """Return (rows, divisor or None, words of each plane set, scale, zero or None)."""
    rows, *rest = refs
    divisor = rest.pop(0) if job.divided else None
    sets = len(job.reader.layout.sets)
    return (
        rows,
        divisor,
        rest[:sets],
        rest[sets],
        rest[sets + 1] if job.reader.centre is None else None,
    )


def _inverse_divisor(divisor: Any, job: Job, chunk: int) -> Array | None:
    """Return 1 / divisor of a chunk, [1, W], or None without a divisor."""
    width = job.reader.layout.width
    return None if divisor is None else 1.0 / divisor[:, pl.ds(chunk * width, width)]


def channel_kernel(*refs: Any, job: Job) -> None:
    """Quantize one span of tokens, group by group. A tile [32 / slots, W] of each chunk is loaded,
    coded and packed in registers.
    """
    # rows [32, H], divisor [1, H], words [32 / slots, tiles * W], scale and zero [H / group, 32]
    rows, divisor, word_refs, scale_ref, zero_ref = _open(refs, job)
    p, run, per_group = (
        job.reader.layout,
        SPAN // job.reader.layout.slots,
        job.reader.group // job.reader.layout.width,
    )

    def store(plane_set: int, tile: int, word: Array) -> None:
        word_refs[plane_set][:, pl.ds(tile * p.width, p.width)] = word

    words = _WordWriter(p, store)
    units = [(slot, group) for slot in range(p.slots) for group in range(p.chunks // per_group)]
    # In the order of tiles, so that few words are open at a time.
    for slot, group in sorted(units, key=lambda unit: p.field(unit[0], unit[1] * per_group).tile):
        chunks = range(group * per_group, (group + 1) * per_group)
        tokens = pl.ds(slot * run, run)
        tiles = []
        for c in chunks:
            x = rows[tokens, pl.ds(c * p.width, p.width)].astype(jnp.float32)
            inverse = _inverse_divisor(divisor, job, c)
            tiles.append(x if inverse is None else x * inverse)
        levels, quantizer = _code_tiles(tiles, job)
        for chunk, level in zip(chunks, levels, strict=True):
            words.add(slot, chunk, level)
        scale_ref[group, tokens] = quantizer.scale[:, 0].astype(scale_ref.dtype)
        if zero_ref is not None:
            zero_ref[group, tokens] = quantizer.zero[:, 0].astype(zero_ref.dtype)


def _code_tiles(tiles: list[Array], job: Job) -> tuple[list[Array], Quantizer]:
    """Quantize groups that run over axis 1 of the tiles side by side."""

    def reduced(operation: Any, pairwise: Any, tiles: list[Array]) -> Array:
        return operation(fold(pairwise, tiles), axis=1)[:, None]

    low, high = reduced(jnp.min, jnp.minimum, tiles), reduced(jnp.max, jnp.maximum, tiles)

    def finite() -> tuple[list[Array], Array, Array]:
        low = within_limit(
            reduced(jnp.min, jnp.minimum, [finite_or(x, jnp.inf) for x in tiles]), job.limit
        )
        high = within_limit(
            reduced(jnp.max, jnp.maximum, [finite_or(x, -jnp.inf) for x in tiles]), job.limit
        )
        return [cleaned(x, low, high) for x in tiles], low, high

    plain = is_plain(low, high, reduced(jnp.sum, jnp.add, tiles), job.limit)
    tiles, low, high = lax.cond(plain, lambda: (tiles, low, high), finite)
    schemes = job.schemes(low, high)
    levels = [[job.levels(x, quantizer) for x in tiles] for quantizer in schemes]
    if len(schemes) == 1:
        return levels[0], schemes[0]
    errors = [
        reduced(
            jnp.sum,
            jnp.add,
            [job.error(x, level, quantizer) for x, level in zip(tiles, of_scheme, strict=True)],
        )
        for of_scheme, quantizer in zip(levels, schemes, strict=True)
    ]
    choose_sym = errors[0] > errors[1]
    chosen = [jnp.where(choose_sym, sym, asym) for asym, sym in zip(*levels, strict=True)]
    return chosen, _choose(choose_sym, *schemes)


def _choose(choose_sym: Array, asym: Quantizer, sym: Quantizer) -> Quantizer:
    return Quantizer(*(jnp.where(choose_sym, s, a) for a, s in zip(asym, sym, strict=True)))


def token_kernel(*refs: Any, job: Job) -> None:
    """Quantize some groups of tokens side by side, one row [groups, W] of each at a time.

    So the range of a group is elementwise, and no lane waits for another. Scales are computed chunk
    by chunk, then codes word row by word row. The second pass reads the rows from the GPU's caches.
    """
    # rows [groups, group, H], divisor [1, H], words [groups, group / slots, tiles * W], scale and
    # zero [groups, H]
    rows, divisor, word_refs, scale_ref, zero_ref = _open(refs, job)
    p, slots, run = job.reader.layout, job.reader.layout.slots, SPAN // job.reader.layout.slots
    inverses = [_inverse_divisor(divisor, job, c) for c in range(p.chunks)]

    def load(token: Any, chunk: int) -> Array:
        x = rows[:, token, pl.ds(chunk * p.width, p.width)].astype(jnp.float32)
        inverse = inverses[chunk]
        return x if inverse is None else x * inverse

    chunks = []
    for c in range(p.chunks):
        low, high, plain = _token_range(functools.partial(load, chunk=c), job)
        quantizer = _token_quantizer(functools.partial(load, chunk=c), low, high, plain, job)
        scale_ref[:, pl.ds(c * p.width, p.width)] = quantizer.scale.astype(scale_ref.dtype)
        if zero_ref is not None:
            zero_ref[:, pl.ds(c * p.width, p.width)] = quantizer.zero.astype(zero_ref.dtype)
        chunks.append((low, high, plain, quantizer))

    def write(clean: bool) -> None:
        def word_row(row: Array, _: None) -> None:
            def store(plane_set: int, tile: int, word: Array) -> None:
                word_refs[plane_set][:, row, pl.ds(tile * p.width, p.width)] = word

            words = _WordWriter(p, store)
            within = row & (run - 1)
            first = (row - within) * slots + within
            for slot in range(slots):
                for c, (low, high, _, quantizer) in enumerate(chunks):
                    x = load(first + slot * run, c)
                    words.add(slot, c, job.levels(cleaned(x, low, high) if clean else x, quantizer))

        lax.fori_loop(0, job.reader.group // slots, word_row, None)

    plain = fold(jnp.logical_and, [plain for _, _, plain, _ in chunks])
    pl.when(plain)(lambda: write(clean=False))
    pl.when(jnp.logical_not(plain))(lambda: write(clean=True))


def _over_tokens(
    job: Job,
    step: Callable[[list[Array], Any], Any],
    load: Callable[[Any], Array],
    carry: Any,
    at_once: int,
) -> Any:
    """Carry step(rows of some tokens, carry) through all tokens of a group."""

    def body(i: Array, carry: Any) -> Any:
        return step([load(i * at_once + j) for j in range(at_once)], carry)

    return lax.fori_loop(0, job.reader.group // at_once, body, carry)


def _token_range(load: Callable[[Any], Array], job: Job) -> tuple[Array, Array, Array]:
    """Return (low, high, plain) of groups that run over tokens."""
    shape = (job.spans, job.reader.layout.width)
    start = jnp.full(shape, jnp.inf), jnp.full(shape, -jnp.inf)

    def step(tiles: list[Array], carry: Any) -> Any:
        low, high, total = carry
        return (
            fold(jnp.minimum, [low, *tiles]),
            fold(jnp.maximum, [high, *tiles]),
            fold(jnp.add, [total, *tiles]),
        )

    low, high, total = _over_tokens(job, step, load, (*start, jnp.zeros(shape)), _AT_ONCE)
    plain = is_plain(low, high, total, job.limit)

    def finite_step(tiles: list[Array], carry: Any) -> Any:
        low, high = carry
        return jnp.minimum(low, finite_or(tiles[0], jnp.inf)), jnp.maximum(
            high, finite_or(tiles[0], -jnp.inf)
        )

    def finite() -> tuple[Array, Array]:
        low, high = _over_tokens(job, finite_step, load, start, 1)
        return within_limit(low, job.limit), within_limit(high, job.limit)

    low, high = lax.cond(plain, lambda: (low, high), finite)
    return low, high, plain


def _token_quantizer(
    load: Callable[[Any], Array], low: Array, high: Array, plain: Array, job: Job
) -> Quantizer:
    """Return the quantizers of groups that run over tokens, chosen for each group in the hybrid
    scheme.
    """
    schemes = job.schemes(low, high)
    if len(schemes) == 1:
        return schemes[0]

    def step(tiles: list[Array], errors: Any) -> Any:
        return [
            fold(
                jnp.add,
                [error, *(job.error(x, job.levels(x, quantizer), quantizer) for x in tiles)],
            )
            for error, quantizer in zip(errors, schemes, strict=True)
        ]

    start = [jnp.zeros(low.shape)] * 2
    asym_error, sym_error = lax.cond(
        plain,
        lambda: _over_tokens(job, step, load, start, _AT_ONCE),
        lambda: _over_tokens(job, step, lambda token: cleaned(load(token), low, high), start, 1),
    )
    return _choose(asym_error > sym_error, *schemes)
