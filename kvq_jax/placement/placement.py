"""Place arrays on a mesh of devices: one table from the names of their axes to the mesh axes that
split them.

    rows     sequences of the batch. Shards never communicate
    heads    KV heads, and the query heads that read them, if a method stores each head apart
    tokens   the body's blocks, dealt out in turn (layer/regions.py). Blocks are coded
             independently, so every method can be split this way. Windows, prompt statistics and
             new tokens are on every shard, and attention over the body is merged, exact up to
             rounding

Everything else is on every device of the mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvq_jax.types.array_types import ArraySpec, AxisName, ModelDims, Tree

AnyMesh = Mesh | AbstractMesh
WAYS = ("rows", "heads", "tokens")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The axes of a mesh that split a cache's rows, KV heads and body tokens. Hashable.

        mesh = jax.make_mesh((4, 2), ("heads", "tokens"))
        split = Placement(mesh, heads="heads", tokens="tokens")
        cache = init_cache("kivi:bits=2", config, batch=1, capacity=1 << 20, placement=split)

    Mesh axes that are not named hold copies. The axes of the mesh may be of any type: programs that
    hold a cache run with axes of type Auto, whatever mesh is in context (crossing.py).

    Attributes:
        mesh: the devices, or an AbstractMesh if only shapes and bytes are needed.
        rows: the mesh axis that splits the sequences of the batch, or None.
        heads: the mesh axis that splits the KV heads, or None.
        tokens: the mesh axis that splits the blocks of the body, or None.

    Raises:
        ValueError: in one line, if the mesh does not have an axis, or one is named twice.
    """

    mesh: AnyMesh
    rows: str | None = None
    heads: str | None = None
    tokens: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(
                "mesh must be a jax.sharding.Mesh, as jax.make_mesh returns, got"
                f" {type(self.mesh).__name__}"
            )
        named = [axis for axis in (self.rows, self.heads, self.tokens) if axis is not None]
        unknown = [axis for axis in named if axis not in self.mesh.axis_names]
        if unknown:
            raise ValueError(
                f"the mesh has no axis {unknown[0]!r}; its axes are"
                f" {', '.join(map(repr, self.mesh.axis_names))}"
            )
        if len(set(named)) < len(named):
            raise ValueError(
                f"one mesh axis cannot split two things: rows={self.rows!r}, heads={self.heads!r},"
                f" tokens={self.tokens!r}"
            )
        object.__setattr__(self, "mesh", _with_auto_axes(self.mesh))

    @classmethod
    def parse(cls, text: str, devices: int | Sequence[Any] | None = None) -> Placement:
        """Return the placement that a text such as "heads=4,tokens=2" describes, on a mesh of its
        own.

        Args:
            text: rows=R,heads=H,tokens=T, each once or not at all.
            devices: the devices to use (default: all), or only their number, which gives an
                abstract mesh.

        Raises:
            ValueError: in one line, if the text cannot be read or asks for more devices than there
                are.
        """
        from kvq_jax.placement import allowed  # it is made of placements

        return allowed.parse(text, devices)

    @classmethod
    def choose(
        cls, spec: Any, dims: ModelDims, devices: int | Sequence[Any] | None = None
    ) -> Placement:
        """Return the placement of one sequence over some devices: heads up to gcd(K, devices), if
        the method allows it, and tokens for the rest.

        Splitting heads costs nothing. Splitting tokens costs two small collectives in each layer.

        Args:
            spec: the cache, or its text.
            dims: the model's config, or its `CacheDims`.
            devices: as in `parse`.

        Raises:
            ValueError: as `init_cache`, and if there is no device.
        """
        from kvq_jax.cache.cache import plans_for  # it is made of placements
        from kvq_jax.placement import allowed

        return allowed.choose(plans_for(spec, dims), devices)

    def size(self, way: str) -> int:
        """Return the number of parts into which "rows", "heads" or "tokens" are split."""
        axis = getattr(self, way)
        return 1 if axis is None else self.mesh.shape[axis]

    @property
    def devices(self) -> int:
        """Return the number of devices of the mesh."""
        return self.mesh.size

    def __str__(self) -> str:
        return ",".join(f"{way}={self.size(way)}" for way in WAYS if self.size(way) > 1) or "whole"

    def split(self, name: AxisName, *, body: bool = False) -> str | None:
        """Return the mesh axis that splits array axes of this name, if any.

        body: the array grows with the body's tokens.
        """
        if name == "batch":
            return self.rows
        if name in ("kv_heads", "heads"):
            return self.heads
        return self.tokens if name == "tokens" and body else None

    def partition(self, spec: ArraySpec) -> PartitionSpec:
        """Return how an array of a cache, an input of a layer or a method parameter is split."""
        return self.along(*spec.names, body=spec.grows)

    def along(self, *names: AxisName, body: bool = False) -> PartitionSpec:
        """Return how an array with axes of these names is split."""
        return PartitionSpec(*(self.split(name, body=body) for name in names))

    def partitions(self, specs: Tree) -> Tree:
        """Return a PartitionSpec for each description of a tree."""
        return jax.tree.map(self.partition, specs)

    def shardings(self, specs: Tree) -> Tree:
        """Return a NamedSharding for each description of a tree.

        Arrays without entries (the sink of a cache that has none) are on every device, because XLA
        returns them so whatever their sharding.
        """

        def sharding(spec: ArraySpec) -> NamedSharding:
            if not all(spec.shape):
                return self.everywhere
            return NamedSharding(self.mesh, self.partition(spec))

        return jax.tree.map(sharding, specs)

    @property
    def everywhere(self) -> NamedSharding:
        """Return the sharding of an array of which each device has a copy."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shard_nbytes(self, specs: Tree) -> int:
        """Return the bytes that each device holds of the arrays that a tree describes. Exact."""

        def shard_bytes(spec: ArraySpec) -> int:
            shape = NamedSharding(self.mesh, self.partition(spec)).shard_shape(spec.shape)
            return jax.ShapeDtypeStruct(shape, spec.struct.dtype).size * spec.struct.dtype.itemsize

        return sum(map(shard_bytes, jax.tree.leaves(specs)))

    def constrained(self, array: jax.Array, *names: AxisName) -> jax.Array:
        """Return an array with axes of these names, split as a cache splits them. For use in a
        program."""
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.along(*names)))


def _with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update(axis_types=types)
