"""The choice between the two routes to a GPU: Mosaic GPU reads bodies in uniform groups, Triton the
rest.

This module imports no Mosaic GPU, which JAX has from 0.11 on.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.lower_limits import LowerLimits
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.decode_attention.tuning import SHARED_BYTES, Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.layout import SPAN, SUPPORTED_BITS

OLDEST_JAX = (0, 11, 0)
HEAD_DIMS = (64, 128, 256)
STRIPE = 4 * SPAN  # tokens: one span for each warp of a block
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


def unsupported(k: Reader, v: Reader, group: int, capacity: int) -> str | None:
    """Return, in one line, why Mosaic GPU does not read this body, or None if it does.

    Args:
        k, v: the readers of keys and values.
        group: query heads for each KV head.
        capacity: tokens.
    """
    for name, reader in (("k", k), ("v", v)):
        if not isinstance(reader, GroupedReader):
            return f"{name}: {type(reader).__name__}, not uniform groups"
        if reader.layout.bits not in SUPPORTED_BITS or reader.layout.channels not in HEAD_DIMS:
            return f"{name}: {reader.layout.bits} bits at head dim {reader.layout.channels}"
        if reader.axis == "tokens" and STRIPE % reader.group:
            return f"{name}: groups of {reader.group} tokens, which do not divide {STRIPE}"
        if reader.scale_dtype != "float16":
            return f"{name}: scales in {reader.scale_dtype}, not in float16"
        most = 16 if reader.layout.channels < 256 else 8
        if group > most:
            return f"{group} query heads for each KV head, more than {most}"
    if capacity < STRIPE:
        return f"a body of {capacity} tokens, fewer than one tile of {STRIPE}"
    return None


def pieces(
    q: Float[Array, "B K G H"],
    keys: tuple[Reader, Sequence[Array]],
    values: tuple[Reader, Sequence[Array]],
    limits: Int[Array, " B"],
    *,
    capacity: int,
    lower: LowerLimits | None,
    soft_cap: float | None,
    tuning: Tuning | None,
    launch: Launch,
) -> Pieces | None:
    """Return the pieces of attention by Mosaic GPU (mosaic/attention.py), or None if the launch
    names another route or this body takes another."""
    (k, _), (v, _) = keys, values
    if launch.route != "mosaic" or unsupported(k, v, q.shape[2], capacity):
        return None
    if reason := missing():
        raise ValueError(f"route='mosaic' cannot run: {reason}")
    attention: Any = importlib.import_module("pallas_kernels.mosaic.attention")
    capability = target_capability()
    columns = 8 if q.shape[2] <= 8 else 16
    return attention.attention_in_pieces(
        q,
        keys,
        values,
        limits,
        capacity=capacity,
        lower=lower,
        soft_cap=soft_cap,
        tuning=tuning or tuning_for(k, v, columns, capacity, capability),
        bulk=launch.interpret or float(capability) >= BULK,
        interpret=attention.interpreted() if launch.interpret else None,
    )


def target_capability() -> str:
    """Return the compute capability of the GPU that is compiled for, or of an H200 if it is not a
    GPU."""
    ambient = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = ambient if ambient is not None else jax.devices()[0]
    return str(getattr(device, "compute_capability", None) or BULK)


def tuning_for(k: Reader, v: Reader, columns: int, capacity: int, capability: str) -> Tuning:
    """Return the longest tile and the most stages of which the shared memory holds RESIDENT blocks.

    Head dim 256 and 16 query columns fill the registers with sums of values, so their tiles are
    single stripes.
    """
    shared = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    beside = OTHER_SHARED_BYTES + 4 * STRIPE * columns  # for reductions
    crowded = k.chunks[0] * k.chunks[1] > 128 or columns > 8
    tiles = [tile for tile in (2 * STRIPE, STRIPE) if tile <= capacity]
    for tile in tiles[-1:] if crowded else tiles:
        for stages in (3, 2):
            of_block = stages * tile * (k.row_bytes + v.row_bytes) + beside
            if RESIDENT * of_block <= shared:
                return Tuning(tile, warps=4, stages=stages, resident=RESIDENT)
    return Tuning(STRIPE, warps=4, stages=2, resident=1)
