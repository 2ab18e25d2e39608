"""The cache of one layer, which `CachePlan.init` (layer_plans.py) makes."""

from __future__ import annotations

import dataclasses

from kvq_jax.cache import display
from kvq_jax.cache.cache import check_held
from kvq_jax.layer.plan import LayerState
from kvq_jax.types.array_types import LengthsB
from kvq_jax.types.pytree import pytree


@pytree
@dataclasses.dataclass(frozen=True, eq=False)
class LayerCache:
    """The keys and values of B sequences in one layer, a pytree of arrays alone. Build it with
    `CachePlan.init`.

    Caches of layers with equal plans can be stacked (`jax.tree.map(lambda *a: jnp.stack(a), ...)`).

    Attributes:
        state: sink, ring, body and prompt statistics.
        lengths: [B] int32, the tokens that each row holds.
    """

    state: LayerState
    lengths: LengthsB

    def __getstate__(self) -> dict[str, object]:
        check_held(self)
        return self.__dict__

    def __repr__(self) -> str:
        facts = {
            "lengths": display.values(self.lengths),
            "in": display.size((self.state, self.lengths)),
        }
        return display.line("LayerCache", facts)
