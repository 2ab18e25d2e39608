"""Caches of the registry as quantizers of a simulation."""

from __future__ import annotations

import dataclasses
import functools

import jax

import kvq_jax as kvq
from kvq_jax.cache.cache import dims_of
from kvq_jax.cache.parameters import parameter_plans
from kvq_jax.codecs.codec import Codec, Side, TokensAt
from kvq_jax.types.array_types import ModelDims, PositionsBT, RowsBKTH
from kvq_jax.types.rope import Rope, rotate
from kvq_tools.evaluation.protocol import BLOCKS, RECENT, SINK


class Cache:
    """A cache without parameters and prompt statistics, whose keys are cached after RoPE."""

    def __init__(self, spec: str, dims: ModelDims) -> None:
        equal = dataclasses.replace(kvq.parse(spec), sink=SINK, recent=RECENT, block=BLOCKS[0])
        self.plans = parameter_plans(equal, dims_of(dims))

    def __call__(
        self, layer: int, side: Side, rows: RowsBKTH, positions: PositionsBT, rope: Rope
    ) -> RowsBKTH:
        plan = self.plans[layer]
        return _read(rows, positions, rope, codec=plan.k if side == "k" else plan.v, side=side)


@functools.partial(jax.jit, static_argnames=("codec", "side"))
def _read(
    rows: RowsBKTH, positions: PositionsBT, rope: Rope, *, codec: Codec, side: Side
) -> RowsBKTH:
    rows = rotate(rows, positions, rope) if side == "k" else rows
    whole = slice(SINK, SINK + (rows.shape[2] - SINK) // BLOCKS[0] * BLOCKS[0])
    body = codec.quantize((), (), rows[:, :, whole], TokensAt(positions[:, whole], prefill=True))
    return rows.at[:, :, whole].set(codec.dequantize((), (), body))
