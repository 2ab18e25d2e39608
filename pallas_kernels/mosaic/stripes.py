"""Stripes of tokens: one span for each warp."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.registers import LANES, WARPS


@dataclasses.dataclass(frozen=True)
class Stripe:
    """WARPS neighbouring spans of tokens in the buffers, one for each warp.

    Args:
        slot: of the buffers.
        number: of the stripe in its tile.
        start: the first token.
        span: the tokens of a warp.
        lower: tokens before it do not count and may hold anything. None if there are none.
        limit: the same for tokens from here on. None if all tokens count.
    """

    slot: Any
    number: int
    start: Any
    span: int
    lower: Any = None
    limit: Any = None

    @property
    def spans(self) -> Any:
        return pl.ds(WARPS * self.number, WARPS)

    @property
    def tokens(self) -> Any:
        size = WARPS * self.span
        return pl.ds(size * self.number, size)

    def zero_dead(self, x: jax.Array, tokens: int | None) -> jax.Array:
        """Replace numbers [WARPS, rows, columns] that belong to no live token by 0. `tokens` is the
        axis of the tokens, or None if numbers belong to the whole span of a warp."""
        if self.limit is None:
            return x
        at = self.start + self.token_numbers(x.shape, tokens)
        live = at < self.limit
        if self.lower is not None:
            live &= at > self.lower - (1 if tokens is not None else self.span)
        return jnp.where(live, x, jnp.zeros_like(x))

    def token_numbers(self, shape: tuple[int, ...], axis: int | None) -> jax.Array:
        """Return the tokens of a stripe by warp and, along `axis`, by their place in the span."""
        spans = self.span * plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=LANES)
        if axis is None:
            return spans
        return spans + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LANES)


def entry(ref: Any, unit: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return the place of a row and a head in an array whose leading axes may be 1 long."""
    return tuple(0 if size == 1 else at for size, at in zip(ref.shape, unit, strict=False))
