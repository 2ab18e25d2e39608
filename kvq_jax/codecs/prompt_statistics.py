"""Statistics that a prompt fixes for the rest of its sequence, such as a norm of each channel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvq_jax.types.array_types import LayerInputs, Tree


def _nothing(*_: object) -> Tree:
    return ()


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The prompt statistics of a codec. Without arguments, there are none.

    spec: (batch, K) -> a tree of `ArraySpec` that describes their arrays.
    of: (params, inputs) -> the arrays, from all valid tokens of a prompt, the sink included.
    unprompted: the value of every statistic of a row that never had a prompt.
    """

    spec: Callable[[int, int], Tree] = _nothing
    of: Callable[[Tree, LayerInputs], Tree] = _nothing
    unprompted: float = 1.0

    def initial(self, batch: int, heads: int) -> Tree:
        """Return the statistics of rows that never had a prompt."""
        return jax.tree.map(
            lambda spec: jnp.full(spec.shape, self.unprompted, spec.dtype), self.spec(batch, heads)
        )
