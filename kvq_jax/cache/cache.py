"""The cache: a pytree that holds the state of sequences and a static description, and nothing of
the model.

    cache = init_cache(parse("kivi:bits=2"), config, batch=1, capacity=4096)

Every leaf has a leading batch axis and its own buffer, so a cache can be donated, be carried by a
scan, and have its rows selected. `init_cache` validates its arguments. Constructors do not, because
tree transformations rebuild a cache with other leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvq_jax.cache import display
from kvq_jax.cache.dims import CacheDims, check_sizes, dims_of
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.methods.base import PerLayer
from kvq_jax.placement.allowed import check_rows, placed
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import ArraySpec, Axis, LengthsB, ModelDims, Tree
from kvq_jax.types.integers import positive
from kvq_jax.types.pytree import describe, pytree

DTYPES = ("bfloat16", "float32", "float16")  # of full-precision rows
ABBREVIATED_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


@pytree
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """A cache for B sequences, a pytree. Build it with `init_cache`.

    Attributes:
        layers: a `LayerState` for each layer.
        lengths: [B] int32, the live tokens of each batch row.
        spec: the method and the windows. Static, as are all the following.
        dims: the dimensions of the model.
        capacity: S, the tokens that each row has room for.
        dtype: the name of the dtype of full-precision rows.
        placement: the placement of the arrays on a mesh, or None for one device.
    """

    layers: tuple[LayerState, ...]
    lengths: LengthsB
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    dims: CacheDims = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def batch(self) -> int:
        """Return B, the number of rows."""
        return self.lengths.shape[0]

    @property
    def plans(self) -> tuple[LayerPlan, ...]:
        """Return the static plan of every layer."""
        return plans(self.spec, self.dims, self.capacity, self.dtype, self.placement)

    @property
    def axes(self) -> Cache:
        """Return the same tree, with an `ArraySpec` in place of each array."""
        return axes(self.spec, self.dims, self.batch, self.capacity, self.dtype, self.placement)

    def __getstate__(self) -> dict[str, object]:
        check_held(self)
        return self.__dict__

    def __repr__(self) -> str:
        return display.line("Cache", {"": self.spec} | self._facts())

    def _repr_html_(self) -> str:
        return display.table("Cache", {"spec": self.spec} | self._facts())

    def _facts(self) -> dict[str, object]:
        rows = getattr(self.lengths, "shape", "?")
        facts: dict[str, object] = {
            "rows": rows[0] if isinstance(rows, tuple) and rows else rows,
            "lengths": display.values(self.lengths),
            "of": f"{self.capacity} tokens",
            "in": display.size((self.layers, self.lengths)),
        }
        return facts if self.placement is None else facts | {"split": str(self.placement)}


@functools.lru_cache(256)  # callers choose specs and capacities
def plans(
    spec: CacheSpec, dims: CacheDims, capacity: int, dtype: str, placement: Placement | None = None
) -> tuple[LayerPlan, ...]:
    """Return the plan of every layer.

    Raise ValueError if the options do not fit the model, or name a layer that it does not have, or
    the method cannot have the placement.
    """
    _check_layers(spec, dims)
    layers = range(dims.num_hidden_layers)
    return tuple(
        placed(spec.layer(i, dims, capacity, dtype), placement, dims.num_attention_heads)
        for i in layers
    )


def plans_for(
    spec: CacheSpec | str, config: ModelDims, dtype: DTypeLike | None = None, capacity: int = 1
) -> tuple[LayerPlan, ...]:
    """Return the plan of every layer of a cache, by default of one token, for questions that do not
    depend on its size. Raise as `init_cache`."""
    spec, dims, _, capacity, name = _checked(spec, config, 1, capacity, dtype, None)
    return plans(spec, dims, capacity, name)


def init_cache(
    spec: CacheSpec | str,
    config: ModelDims,
    batch: int,
    capacity: int,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
) -> Cache:
    """Return an empty cache.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        batch: B, the number of sequences.
        capacity: S, the tokens that each sequence has room for.
        dtype: the dtype of full-precision rows: float32, bfloat16 or float16. Default: the model's
            dtype, if its config has one (as after `load_llama`), else bfloat16. So keys in float32
            are rounded, in `dense` too, if neither `dtype` nor the config says float32.
        placement: the devices of a mesh and the part of the cache that each of them holds. The
            cache is made there, part by part. Default: one device.

    Raises:
        ValueError: for another dtype, for dimensions that are not a model's, and if the options do
            not fit the model: a group size that does not divide the head dim, skip_layers beyond
            the last layer, a placement or an attention that the method cannot have.
        NotImplementedError: in one line that names the field, if the config asks for attention that
            kvq does not compute, such as chunks or latents. `CacheDims` say what they ask for.
    """
    spec, dims, batch, capacity, name = _checked(spec, config, batch, capacity, dtype, placement)
    empty = functools.partial(_empty, spec, dims, batch, capacity, name, placement)
    if placement is None:
        return empty()
    if not isinstance(placement.mesh, Mesh):
        raise ValueError(
            "a cache needs the devices of a mesh, and an AbstractMesh has none: kvq.cache.layout"
            " describes such a cache"
        )
    described = axes(spec, dims, batch, capacity, name, placement)
    return jax.jit(empty, out_shardings=shardings(described, placement))()


def _empty(
    spec: CacheSpec,
    dims: CacheDims,
    batch: int,
    capacity: int,
    dtype: str,
    placement: Placement | None,
) -> Cache:
    layers = tuple(
        _empty_layer(plan, batch, dtype) for plan in plans(spec, dims, capacity, dtype, placement)
    )
    return Cache(layers, jnp.zeros((batch,), jnp.int32), spec, dims, capacity, dtype, placement)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_layer(plan: LayerPlan, batch: int, dtype: str) -> LayerState:
    """Return `plan.init`, as one program for all layers of equal plans: a start of the command
    would compile one for each shape."""
    return plan.init(batch, dtype)


def axes(
    spec: CacheSpec | str,
    config: ModelDims,
    batch: int,
    capacity: int,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
) -> Cache:
    """Describe every array of a cache: return the tree of `init_cache(...)` with an `ArraySpec` of
    named axes for each array. Allocates nothing.

        described = axes("kivi", config, batch=1, capacity=4096)
        described.layers[0].body[0].scale["tokens"]      # Axis("tokens", 4000, per=32)

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        batch: B, the number of sequences.
        capacity: S, the tokens that each sequence has room for.
        dtype: the dtype of full-precision rows, as in `init_cache`.
        placement: the placement on a mesh, or None for one device.

    Raises:
        ValueError: as `init_cache`.
    """
    spec, dims, batch, capacity, name = _checked(spec, config, batch, capacity, dtype, placement)
    of_layers = plans(spec, dims, capacity, name, placement)
    # most layers of a model have equal plans
    described = {plan: plan.axes(batch, name) for plan in dict.fromkeys(of_layers)}
    layers = tuple(described[plan] for plan in of_layers)
    lengths = ArraySpec((Axis("batch", batch),), "int32")
    return describe(
        Cache,
        layers=layers,
        lengths=lengths,
        spec=spec,
        dims=dims,
        capacity=capacity,
        dtype=name,
        placement=placement,
    )


def layout(
    spec: CacheSpec | str,
    config: ModelDims,
    batch: int,
    capacity: int,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
) -> Cache:
    """Return the ShapeDtypeStructs of `init_cache(...)`, with their shardings if there is a
    placement. Allocates nothing.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.
        batch: B, the number of sequences.
        capacity: S, the tokens that each sequence has room for.
        dtype: the dtype of full-precision rows, as in `init_cache`.
        placement: the placement on a mesh, which may be an AbstractMesh, or None for one device.

    Raises:
        ValueError: as `init_cache`.
    """
    described = axes(spec, config, batch, capacity, dtype, placement)
    structs = jax.tree.map(lambda spec: spec.struct, described)
    if placement is None:
        return structs
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        structs,
        shardings(described, placement),
    )


def shardings(described: Cache, placement: Placement) -> Cache:
    """Return the same tree with a NamedSharding for each description. Every device has the lengths,
    because hosts read them."""
    of_layers = jax.tree.leaves(placement.shardings(described.layers))
    return jax.tree.unflatten(jax.tree.structure(described), [*of_layers, placement.everywhere])


def check_held(tree: Tree, what: str = "this cache") -> None:
    """Raise ValueError, which calls the tree `what`, if a call has consumed it: its donated buffers
    are gone."""
    arrays = (
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    )
    if any(array.is_deleted() for array in arrays):
        raise ValueError(
            f"{what} was consumed by a call that took it over (prefill, score, generate, or a jit"
            " that donates it): go on with that call's result"
        )


def check_cache(cache: Cache) -> None:
    """Raise ValueError if this is not a cache of `init_cache`, or a call has consumed it."""
    if not isinstance(cache, Cache):
        remedy = {
            "LayerCache": "; its plan attends, appends, reads and trims the cache of one layer, and"
            " jax.tree.map selects rows",
            "Step": "; kvq.finish(step) returns the cache",
        }.get(type(cache).__name__, "")
        raise ValueError(
            f"this call takes a cache of kvq.init_cache, got {type(cache).__name__}{remedy}"
        )
    check_held(cache)


def has_prompt_statistics(spec: CacheSpec | str, config: ModelDims) -> bool:
    """Return True if a cache of this model takes statistics from a sequence's prompt: InnerQ's key
    norm, SQuat's subspace.

    A sequence that starts without a prompt is quantized as if the method had no such part, but for
    largest values that its first tokens exceed.

    Args:
        spec: the cache, or its text.
        config: the model's config, or its `CacheDims`.

    Raises:
        ValueError: as `init_cache`.
    """
    codecs = ((codec, plan.heads) for plan in set(plans_for(spec, config)) for codec in plan.codecs)
    return any(
        math.prod(leaf.shape)
        for codec, heads in codecs
        for leaf in jax.tree.leaves(codec.statistics.spec(1, heads))
    )


def _checked(
    spec: CacheSpec | str,
    config: ModelDims,
    batch: int,
    capacity: int,
    dtype: DTypeLike | None,
    placement: Placement | None,
) -> tuple[CacheSpec, CacheDims, int, int, str]:
    spec, dims = parse(spec), dims_of(config)
    batch, capacity = positive("batch", batch), positive("capacity", capacity)
    check_rows(placement, batch)
    return spec, dims, batch, capacity, row_dtype(config, dtype)


def row_dtype(config: ModelDims | None, dtype: DTypeLike | None) -> str:
    """Return the name of a cache's dtype. Hugging Face's configs name theirs as PyTorch does:
    torch.float32."""
    wanted = getattr(config, "dtype", None) if dtype is None else dtype
    text = str(wanted).removeprefix("torch.") if wanted is not None else DTYPES[0]
    text = ABBREVIATED_DTYPES.get(text, text)
    try:
        name = text if text in DTYPES else jnp.dtype(wanted).name
    except TypeError:
        name = text
    if name not in DTYPES:
        raise ValueError(
            f"dtype={name!r} is not supported in a cache; supported: {', '.join(DTYPES)}"
        )
    return name


def _check_layers(spec: CacheSpec, dims: CacheDims) -> None:
    """Raise ValueError if the spec names a layer that the model does not have, or the dimensions
    do not fit each other."""
    if dims.attention and len(dims.attention) != dims.num_hidden_layers:
        raise ValueError(
            f"attention has {len(dims.attention)} entries for {dims.num_hidden_layers} layers: give"
            " one for each, or none if all are plain"
        )
    check_sizes(dims)
    named = [("skip_layers names", layer) for layer in spec.skip_layers]
    for method in (spec.k, spec.v):
        first = method.carries_from()
        named += [] if first is None else [(f"{method.name} starts at", first)]
        for field in method.options():
            value = getattr(method, field.name)
            if isinstance(value, PerLayer):
                named += [
                    (f"{method.name}:{field.name} names", last) for _, _, last in value.ranges
                ]
    for setting, layer in named:
        if layer >= dims.num_hidden_layers:
            raise ValueError(
                f"{setting} layer {layer}, but the model has layers 0 to"
                f" {dims.num_hidden_layers - 1}"
            )
