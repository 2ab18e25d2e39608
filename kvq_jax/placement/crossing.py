"""Run programs over a cache on a mesh from any context: no mesh, one with Auto axes, or one with
Explicit axes.

    with crossing(placement) as mesh:      # axes are of type Auto inside, like the cache's
        x = mesh.taken(x)                  # from the caller's mesh to the placement's
        ...
    return mesh.handed(out, "batch")       # and back

A mesh with axes of type Explicit, as `jax.make_mesh` makes them, would ask for a sharding of each
product. Without a placement nothing happens, and programs for one device do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import AxisName, Tree


def explicit_axes(array: jax.Array) -> list[str]:
    """Return the mesh axes of type Explicit that split an array."""
    spec = jax.typeof(array).sharding.spec
    return [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The way from the mesh around a call to the mesh of a placement, and back."""

    placement: Placement | None
    around: AbstractMesh

    def taken(self, tree: Tree) -> Tree:
        """Return the arrays of a tree as arrays of the placement's mesh. Call it inside."""
        return tree if self.placement is None else jax.tree.map(self._take, tree)

    def everywhere(self, tree: Tree) -> Tree:
        """Return the arrays of a tree with a copy on every device. Call it inside."""
        if self.placement is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.placement.everywhere)

    def handed(self, array: jax.Array, *names: AxisName) -> jax.Array:
        """Return an array with axes of these names as one of the mesh around. Call it outside."""
        if self.placement is None or AxisType.Explicit not in self.around.axis_types:
            return array
        same = self.around.axis_names == self.placement.mesh.axis_names
        return jax.sharding.reshard(
            array, self.placement.along(*names) if same else PartitionSpec()
        )

    def _take(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return leaf
        assert self.placement is not None
        mesh = self.placement.mesh
        if sharding.mesh.axis_names != mesh.axis_names:
            return jax.sharding.reshard(leaf, PartitionSpec())
        # `reshard` refuses the names of axes that are of type Auto here
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, sharding.spec))


@contextlib.contextmanager
def crossing(placement: Placement | None) -> Iterator[Crossing]:
    """Enter the mesh of a placement, if there is one."""
    around = jax.sharding.get_abstract_mesh()
    with contextlib.ExitStack() as stack:
        if placement is not None and not around.empty and around != placement.mesh.abstract_mesh:
            stack.enter_context(jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh))
        yield Crossing(placement, around)
