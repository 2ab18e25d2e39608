"""Statistics that the first tokens of a sequence fix for the rest of it, such as a norm of each
channel.

A prompt gives them. A short one says little about what comes after it: one token's largest entry
may be a tenth of the next one's. Largest values therefore go on growing until the first block is
quantized (cache/update.py), because until then all tokens are exact and no code depends on them.
So they come from at least sink + recent + block tokens, if the sequence has as many.
"""

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
    widens: True if the statistics of two parts are the larger of each, entry by entry. `of` must
        then give at most the other part's for tokens that say nothing, such as zeros.
    """

    spec: Callable[[int, int], Tree] = _nothing
    of: Callable[[Tree, LayerInputs], Tree] = _nothing
    unprompted: float = 1.0
    widens: bool = False

    def initial(self, batch: int, heads: int) -> Tree:
        """Return the statistics of rows that never had a prompt."""
        return jax.tree.map(
            lambda spec: jnp.full(spec.shape, self.unprompted, spec.dtype), self.spec(batch, heads)
        )
