"""The choice between the two routes to a GPU: Mosaic GPU reads bodies in uniform groups, in tables,
in polar form, in full precision and in runs of channels, Triton the rest.

This module imports no Mosaic GPU, which JAX has from 0.11 on.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.decode_attention.tuning import Tuning, shared_bytes_of, target_capability
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.codebook import CodebookReader
from pallas_kernels.readers.dense import DenseReader
from pallas_kernels.readers.eigen_keys import EigenKeys
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.readers.polar import PolarReader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.readers.run_chunks import WIDTH
from pallas_kernels.readers.runs import RunsReader
from pallas_kernels.tiles.layout import SPAN, SUPPORTED_BITS, TABLE_BITS

OLDEST_JAX = (0, 11, 0)
HEAD_DIMS = (64, 128, 256)
WARPS = 4  # of a block
STRIPE = WARPS * SPAN  # tokens: one span for each warp of a block
RESIDENT = 2  # blocks of four warps that the registers of a multiprocessor hold
OTHER_SHARED_BYTES = 2048  # of a block: barriers, and what the system keeps
BULK = 9.0  # the first compute capability with a copy engine


@functools.cache
def missing() -> str | None:
    """Return, in one line, why this JAX cannot compile kernels for Mosaic GPU, or None if it
    can."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"Mosaic GPU needs JAX 0.11, this is {jax.__version__}"
    try:
        importlib.import_module("pallas_kernels.mosaic.attention")
    except (ImportError, AttributeError) as error:
        return f"JAX {jax.__version__} has another Mosaic GPU: {error}"
    return None


def unsupported(
    k: Reader, v: Reader, group: int, capacity: int, capability: str | None = None
) -> str | None:
    """Return, in one line, why Mosaic GPU does not read this body, or None if it does.

    Args:
        k, v: the readers of keys and values.
        group: query heads for each KV head.
        capacity: tokens.
        capability: the compute capability of the GPU, or None for any with a copy engine.
    """
    for name, reader in (("k", k), ("v", v)):
        if reason := _unread(reader) or _crowded(math.prod(reader.chunks), group):
            return f"{name}: {reason}"
    if isinstance(k, RunsReader) != isinstance(v, RunsReader):
        return "runs of channels of several widths on one side alone"
    minimum, stripe = min_tile(k, v, capability or str(BULK)), WARPS * span_of(k, v)
    if capacity < minimum:
        return f"a body of {capacity} tokens, fewer than one tile of {minimum}"
    if minimum > 2 * stripe:
        return f"so few scales that GPUs without a copy engine need tiles of {minimum} tokens"
    return None


def min_tile(k: Reader, v: Reader, capability: str) -> int:
    """Return the fewest tokens of a tile. Without a copy engine, each of a block's threads copies
    at least two of a tile's scales, or zero points."""
    stripe = WARPS * span_of(k, v)
    if float(capability) >= BULK:
        return stripe
    sides = [reader.inner if isinstance(reader, RotatedReader) else reader for reader in (k, v)]
    scaled = [
        reader
        for reader in sides
        if isinstance(reader, GroupedReader)
        or (isinstance(reader, CodebookReader) and reader.affine == "tokens")
    ]
    threads = 32 * WARPS
    return max([stripe, *(2 * threads * r.group // r.layout.channels for r in scaled)])


def unserved(k: Reader, v: Reader, group: int, capacity: int) -> str | None:
    """Return, in one line, why Mosaic GPU does not do all of a decode step over this body, or None
    if it does, but for blocks that `unwritten` names, which XLA writes."""
    for name, reader in (("k", k), ("v", v)):
        reader = reader.inner if isinstance(reader, RotatedReader) else reader
        if isinstance(reader, GroupedReader) and (reason := unquantized(reader)):
            return f"{name}: {reason}"
    return unsupported(k, v, group, capacity)


def _unread(reader: Reader, turned: bool = False) -> str | None:
    """Return, in one line, why Mosaic GPU does not read this side, or None if it does. `turned`:
    keys before RoPE."""
    if isinstance(reader, DenseReader):
        return None if reader.channels in HEAD_DIMS else f"head dim {reader.channels}"
    if isinstance(reader, RotatedReader):
        if reader.shards > 1 and reader.block % SPAN:
            return f"shards of blocks of {reader.block} tokens before RoPE, not of whole spans"
        return _unread(reader.inner, turned=True)
    if isinstance(reader, PolarReader) and not turned:
        return _unread_polar(reader)
    if isinstance(reader, RunsReader):
        return None
    if not isinstance(reader, (GroupedReader, CodebookReader)):
        return f"{type(reader).__name__}, not uniform groups, tables or rows"
    served = SUPPORTED_BITS if isinstance(reader, GroupedReader) else TABLE_BITS
    if reader.layout.bits not in served or reader.layout.channels not in HEAD_DIMS:
        return f"{reader.layout.bits} bits at head dim {reader.layout.channels}"
    if isinstance(reader, CodebookReader) and reader.pool not in (0, SPAN):
        return f"outliers of {reader.pool} tokens share slots, not of {SPAN}"
    if isinstance(reader, CodebookReader) and reader.affine == "channels" and not turned:
        return "tables with scales of channels, not of keys before RoPE"
    if isinstance(reader, GroupedReader) and reader.axis == "tokens" and STRIPE % reader.group:
        return f"groups of {reader.group} tokens, which do not divide {STRIPE}"
    if reader.scale_dtype != "float16":
        return f"scales in {reader.scale_dtype}, not in float16"
    return None


def _unread_polar(reader: PolarReader) -> str | None:
    if math.prod(reader.chunks) not in HEAD_DIMS:
        return f"head dim {math.prod(reader.chunks)}"
    if reader.angle_bits < 4:
        return f"angles of {reader.angle_bits} bits, fewer than 4"
    if STRIPE % reader.group:
        return f"groups of {reader.group} tokens, which do not divide {STRIPE}"
    return None if reader.scale_dtype == "float16" else f"steps in {reader.scale_dtype}"


def span_of(k: Reader, v: Reader) -> int:
    """Return the tokens that a warp reads at a time: a span; half of one if all are rows in full
    precision, of which a tile takes much shared memory; or two for runs of channels."""
    if isinstance(v, RunsReader):
        return 2 * SPAN
    return SPAN if k.packed or v.packed else SPAN // 2


def pieces(
    q: Float[Array, "B K G H"],
    keys: tuple[Reader, Sequence[Array]],
    values: tuple[Reader, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    lower: LowerLimits | None,
    soft_cap: float | None,
    heads: range,
    tuning: Tuning | None,
    launch: Launch,
) -> list[Pieces] | None:
    """Return the pieces of attention by Mosaic GPU (mosaic/attention.py), or None if the launch
    names another route or this body takes another."""
    (k, _), (v, _) = keys, values
    capability = str(BULK) if launch.interpret else target_capability()
    if launch.route != "mosaic" or unsupported(k, v, q.shape[2], capacity, capability):
        return None
    attention = _module("attention", launch)
    columns = 8 if q.shape[2] <= 8 else 16
    return attention.attention_in_pieces(
        q,
        keys,
        values,
        limits,
        capacity=capacity,
        lower=lower,
        soft_cap=soft_cap,
        heads=heads,
        tuning=tuning or tuning_for(k, v, columns, capacity, capability),
        bulk=float(capability) >= BULK,
        interpret=_interpreted(launch),
    )


def tuning_for(k: Reader, v: Reader, columns: int, capacity: int, capability: str) -> Tuning:
    """Return the longest tile and the most stages of which the shared memory holds RESIDENT blocks.

    Head dim 256 and 16 query columns fill the registers with sums of values, so their tiles are
    single stripes.
    """
    shared = shared_bytes_of(capability)
    beside = OTHER_SHARED_BYTES + 4 * STRIPE * columns  # for reductions
    of_token = k.row_bytes + v.row_bytes
    runs = isinstance(k, RunsReader)
    if runs:  # cosines and sines: for each warp's part of a tile, and of 16 rows twice
        of_warp = 4 * k.channels
        beside, of_token = beside + (2 * 16 + 1) * of_warp, of_token + 2 + of_warp // (2 * SPAN)
        if isinstance(k, EigenKeys):  # the matrix that makes keys of their channels
            beside += 2 * k.channels * WIDTH * len(k.pieces)
    elif k.turns:  # cosines and sines, of each span and of the distances in one
        of_span = 2 * math.prod(k.chunks)
        beside, of_token = beside + SPAN * of_span, of_token + of_span // SPAN
    if isinstance(k, PolarReader):  # steps and least values of groups
        of_token += 4 * math.prod(k.chunks) // k.group
    if k.adds_scores:  # at most as many as columns
        of_token += 4 * columns
    crowded = k.chunks[0] * k.chunks[1] > (64 if runs else 128) or columns > 8
    stripe, minimum = WARPS * span_of(k, v), min_tile(k, v, capability)
    tiles = [tile for tile in (2 * stripe, stripe) if minimum <= tile <= capacity]
    for tile in tiles[-1:] if crowded else tiles:
        for stages in (3, 2):
            of_block = stages * tile * of_token + beside
            if RESIDENT * of_block <= shared:
                return Tuning(tile, warps=4, stages=stages, resident=RESIDENT)
    stages = 2 if 2 * minimum * of_token + beside <= shared else 1
    return Tuning(minimum, warps=4, stages=stages, resident=1)


def merged(
    parts: Sequence[Splits | Pieces],
    shapes: Sequence[jax.ShapeDtypeStruct],
    positions: Int[Array, " B"] | None,
    capacity: int,
    launch: Launch,
) -> Sequence[Array] | None:
    """Return the outputs of `decode_attention.merge` by Mosaic GPU (mosaic/merge.py), or None if
    the launch names another route or there are more pieces side by side than it merges."""
    if launch.route != "mosaic" or unmerged(parts, shapes[-1].shape[3]):
        return None
    return _module("merge", launch).call(parts, shapes, positions, capacity, _interpreted(launch))


def unmerged(parts: Sequence[Splits | Pieces], channels: int) -> str | None:
    """Return, in one line, why Mosaic GPU does not merge these parts, or None if it does."""
    for part in parts:
        if isinstance(part, Splits) and part.m.shape[2] > 1:
            return f"{part.m.shape[2]} splits of the windows, more than one"
    return f"head dim {channels}" if channels % (WARPS * 8) else None


def appended(
    works: Sequence[Any],
    numbers: Sequence[Array],
    rows: Sequence[Array],
    inputs: Sequence[Sequence[Array]],
    stored: Sequence[Sequence[Array]],
    queries: Any,
    launch: Launch,
) -> tuple[list[list[Array]], list[Array]]:
    """Return the outputs of `quantize.append` by Mosaic GPU (mosaic/append.py)."""
    module = _module("append", launch)
    return module.append(works, numbers, rows, inputs, stored, queries, _interpreted(launch))


def unappended(writers: Sequence[Any], rings: Sequence[Array], queries: Any) -> str | None:
    """Return, in one line, why Mosaic GPU does not append tokens to these windows, or None if it
    does.

    Args:
        writers: what quantizes the blocks of each side.
        rings: of each side, [B, K, R, H].
        queries: what attends to the windows.
    """
    for name, writer, ring in zip("kv", writers, rings, strict=False):
        if ring.shape[3] not in HEAD_DIMS:
            return f"{name}: rows of {ring.shape[3]} channels"
        if writer is not None and (reason := unwritten(writer)):
            return f"{name}: {reason}"
    if queries is None:
        return None
    return _crowded(rings[0].shape[3], queries.q.shape[2])


def unwritten(writer: Any) -> str | None:
    """Return, in one line, why Mosaic GPU does not write the blocks of this writer, or None if it
    does."""
    # these import this module
    from pallas_kernels.quantize.blocks import GroupedBlocks, RowBlocks
    from pallas_kernels.quantize.polar import PolarBlocks
    from pallas_kernels.quantize.table import TableBlocks

    if isinstance(writer, GroupedBlocks):
        return unquantized(writer.job.reader)
    if isinstance(writer, RowBlocks):
        return None
    if isinstance(writer, PolarBlocks):
        channels, group = 2 * writer.layout.channels, writer.group
        # a matrix of eight rows of words has one slot of its tokens
        if channels not in HEAD_DIMS or writer.layout.slots > SPAN // 8:
            return f"{writer.layout.bits} bits for a pair at head dim {channels}"
        return f"groups of {group} tokens" if group not in (32, 64, 128) else None
    if not isinstance(writer, TableBlocks):
        return f"blocks of {type(writer).__name__}"
    if writer.unit != SPAN:
        return f"outliers of {writer.unit} tokens share slots, not of {SPAN}"
    if writer.layout.bits not in TABLE_BITS or writer.layout.channels not in HEAD_DIMS:
        return f"{writer.layout.bits} bits at head dim {writer.layout.channels}"
    return None


def quantized(
    rows: Float[Array, "B K T H"],
    divisor: Float[Array, "B K 1 H"] | None,
    outputs: Sequence[jax.ShapeDtypeStruct],
    job: Any,
    launch: Launch,
) -> Sequence[Array]:
    """Return the outputs of `quantize.kernel` by Mosaic GPU (mosaic/quantize.py)."""
    module = _module("quantize", launch)
    return module.packed(rows, divisor, outputs, job, _interpreted(launch))


def unquantized(reader: GroupedReader) -> str | None:
    """Return, in one line, why Mosaic GPU does not quantize rows for this reader, or None."""
    if reader.axis == "tokens" and reader.group != SPAN:
        return f"groups of {reader.group} tokens, not of {SPAN}"
    if reader.layout.bits not in SUPPORTED_BITS or reader.layout.channels not in HEAD_DIMS:
        return f"{reader.layout.bits} bits at head dim {reader.layout.channels}"
    return None


def _crowded(channels: int, group: int) -> str | None:
    maximum = 16 if channels < 256 else 8
    return (
        None if group <= maximum else f"{group} query heads for each KV head, more than {maximum}"
    )


def _module(name: str, launch: Launch) -> Any:
    """Import a module of Mosaic GPU's kernels. Raise ValueError, with the reason, if this JAX
    cannot compile them."""
    if reason := missing():
        raise ValueError(f"route={launch.route!r} cannot run: {reason}")
    return importlib.import_module(f"pallas_kernels.mosaic.{name}")


def _interpreted(launch: Launch) -> Any:
    return _module("attention", launch).interpreted() if launch.interpret else None
