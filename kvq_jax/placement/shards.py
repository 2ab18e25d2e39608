"""Run functions of one layer on every shard of a placement. Each call gets its share of heads, rows
and blocks, and a plan that says so.

Between these functions, the compiler splits the model's own products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from kvq_jax.layer.plan import LayerPlan
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import ArraySpec, AxisName, LayerInputs, Tree
from kvq_jax.types.pytree import describe

INPUT_AXES: dict[str, tuple[AxisName, ...]] = {  # new tokens are on every shard of the body
    "x": ("batch", "none", "model"),
    "residual": ("batch", "none", "model"),
    "q_pre": ("batch", "heads", "none", "channels"),
    "q_rot": ("batch", "heads", "none", "channels"),
    "k_pre": ("batch", "kv_heads", "none", "channels"),
    "k_rot": ("batch", "kv_heads", "none", "channels"),
    "v": ("batch", "kv_heads", "none", "channels"),
    "positions": ("batch", "none"),
    "valid": ("batch", "none"),
    "rope": (),
    "sinks": ("heads",),
}


def state_partition(plan: LayerPlan, placement: Placement) -> Tree:
    """Return the PartitionSpec of every array of a layer's state."""
    return placement.partitions(plan.axes(1, "float32"))


def input_partition(placement: Placement) -> LayerInputs:
    """Return the PartitionSpec of every field of a layer's inputs."""
    return describe(
        LayerInputs, **{name: placement.along(*axes) for name, axes in INPUT_AXES.items()}
    )


def carry_partition(placement: Placement) -> PartitionSpec:
    """Return the PartitionSpec of the carry from layer to layer: an accumulator of body tokens
    [B, S, D], or nothing."""
    return placement.along("batch", "tokens", "model", body=True)


def parameter_partition(placement: Placement, described: Callable[[], Tree], params: Tree) -> Tree:
    """Return the PartitionSpec of a layer's method parameters. `described` returns their axes, and
    is called only if heads are split."""
    if placement.size("heads") == 1 or not jax.tree.leaves(params):
        return PartitionSpec()
    specs = described()
    structure = jax.tree.structure(specs, is_leaf=lambda node: isinstance(node, ArraySpec))
    if structure != jax.tree.structure(params):
        raise ValueError(
            "the method's parameters are not those that it describes, so they cannot be split along"
            " heads"
        )
    return placement.partitions(specs)


def on_shards(
    function: Callable[..., Any], placement: Placement, in_specs: Tree, out_specs: Tree
) -> Callable[..., Any]:
    """Return a function of whole arrays that runs `function` on every shard's parts. `function`
    calls its own collectives."""
    return jax.shard_map(
        function, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def of_holder(rows: Array, holds: Array, axis: str) -> Array:
    """Return, on every shard along a mesh axis, the rows of the shard that holds them, bit for bit:
    a sum of integers and zeros."""
    unsigned = jnp.dtype(f"uint{8 * rows.dtype.itemsize}")
    # no collective of 16 bits runs everywhere
    bits = lax.bitcast_convert_type(rows, unsigned).astype(jnp.uint32)
    total = lax.psum(jnp.where(holds, bits, 0), axis)
    return lax.bitcast_convert_type(total.astype(unsigned), rows.dtype)
