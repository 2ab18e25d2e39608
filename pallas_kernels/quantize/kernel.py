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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int16

from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.mosaic import route as mosaic
from pallas_kernels.quantize.group_kernels import channel_kernel, token_kernel
from pallas_kernels.quantize.rounding import Job, Scheme
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN, SUPPORTED_BITS
from pallas_kernels.triton_call import triton_call, whole_array_but


class PackedRows(NamedTuple):
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
) -> PackedRows:
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
    if launch.route == "mosaic" and not mosaic.unquantized(reader):
        return _by_mosaic(rows, reader, scheme, bits, divisor, launch)
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
    return PackedRows(flat, outputs[sets], outputs[sets + 1] if len(scales) == 2 else None)


def _by_mosaic(
    rows: Float[Array, "B K T H"],
    reader: GroupedReader,
    scheme: Scheme,
    bits: int,
    divisor: Float[Array, "B K 1 H"] | None,
    launch: Launch,
) -> PackedRows:
    *shape, tokens, channels = rows.shape
    layout, dtype = reader.layout, jnp.dtype(reader.scale_dtype)
    sizes = (channels // reader.group, tokens)
    if reader.axis == "tokens":
        sizes = (tokens // reader.group, channels)
    words = [
        jax.ShapeDtypeStruct((*shape, tokens // layout.slots, layout.words(b)), jnp.int16)
        for b in layout.sets
    ]
    scales = [jax.ShapeDtypeStruct((*shape, *sizes), dtype)] * (2 if reader.centre is None else 1)
    job = Job(reader, scheme, bits, divisor is not None, 1, asm=False)
    divisor = None if divisor is None else divisor.astype(jnp.float32)
    outputs = mosaic.quantized(rows, divisor, [*words, *scales], job, launch)
    scale, *zero = outputs[len(words) :]
    return PackedRows(tuple(outputs[: len(words)]), scale, zero[0] if zero else None)


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
