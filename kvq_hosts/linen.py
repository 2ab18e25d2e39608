"""Quantized caches in the attention layers of Flax Linen, as an `attention_fn`.

    class Block(nn.Module):
        plan: kvq.cache.CachePlan

        @nn.compact
        def __call__(self, x, prefill):
            attend = cached_attention(self, self.plan, prefill=prefill)
            return nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attend)(x)

The module's "cache" collection keeps a `kvq.cache.LayerCache`, so `nn.scan` stacks the caches of
its layers with `variable_axes={"cache": 0}`, and applying the module with
mutable=["cache"] returns them. `flax.serialization` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import serialization
from jaxtyping import Array, Float

import kvq_jax as kvq

Attend = Callable[
    [Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T N H"],
]


def _to_state(cache: kvq.cache.LayerCache) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _from_state(cache: kvq.cache.LayerCache, state: dict[str, Any]) -> kvq.cache.LayerCache:
    wanted = _to_state(cache)
    fits = state.keys() == wanted.keys()
    for name, leaf in wanted.items() if fits else ():
        fits &= (leaf.shape, leaf.dtype) == (state[name].shape, state[name].dtype)
    if not fits:
        raise ValueError("this state is of the cache of another plan or batch")
    return jax.tree.unflatten(jax.tree.structure(cache), [state[name] for name in wanted])


# flax.serialization knows no pytrees but its own
serialization.register_serialization_state(
    kvq.cache.LayerCache, _to_state, _from_state, override=True
)


def cached_attention(
    module: nn.Module,
    plan: kvq.cache.CachePlan,
    *,
    prefill: bool,
    name: str = "layer",
    **options: Any,
) -> Attend:
    """Return an `attention_fn` (query, key, value) -> attention that keeps keys and values in a
    variable of a module's "cache" collection. Call it in the module's compact method.

    The module's initialization makes the empty cache and adds nothing to it.

    Args:
        module: the module that owns the cache, bound.
        plan: the layer's plan.
        prefill: static. True for prompts.
        name: the name of the variable.
        options: as in `CachePlan.attend` (lengths, padding, scale, parameters, ...).

    Raises:
        ValueError: for lse=True, which has no place in what Linen expects. The function raises it
            for a mask and for dropout, which Linen would leave out in silence if the function did
            not name them.
    """
    if options.get("lse"):
        raise ValueError("Linen's attention_fn returns attention alone: leave lse=True out")

    def attend(
        query: Array,
        key: Array,
        value: Array,
        mask: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
    ) -> Array:
        if mask is not None:
            raise ValueError(
                "a quantized cache is causal and takes no mask: give padding as `lengths` to"
                " cached_attention, a window to the plan, and leave `mask` and decode=True out"
            )
        if dropout_rate and not deterministic:
            raise ValueError("a quantized cache has no dropout: call with deterministic=True")
        cache = module.variable("cache", name, plan.init, query.shape[0])
        out, after = plan.attend(cache.value, query, key, value, prefill=prefill, **options)
        if not module.is_initializing():
            cache.value = after
        return out

    return attend
