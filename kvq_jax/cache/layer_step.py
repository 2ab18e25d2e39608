"""Take new tokens through one layer of a cache: which of them are stored, which code serves the
layer, and on which devices it runs.

`step.py` does so for all layers of a model, `layer_plans.py` for one layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from kvq_jax.arrays.paged import PagedBody
from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import XLA, Implementation, Route
from kvq_jax.cache.cache import CacheDims, check_held
from kvq_jax.cache.call_layout import Layout, check_floats
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.parameters import misshapen_parameter, missing_parameters, parameter_axes
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.placement.crossing import crossing, explicit_axes
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.shards import (
    carry_partition,
    input_partition,
    on_shards,
    parameter_partition,
    state_partition,
)
from kvq_jax.types.array_types import (
    ArraySpec,
    Integers,
    LayerInputs,
    LengthsB,
    PositionsBT,
    QueryBNTH,
    Tree,
    ValidBT,
)
from kvq_jax.types.integers import check_at_most, int32, positive
from kvq_jax.types.rope import Rope


def check_parameters(spec: str, layer: int, plan: LayerPlan, params: Tree, taker: str) -> None:
    """Raise ValueError if parameters are not those of one layer, some that the layer's method needs
    are missing, or some have the shapes of another spec. `taker` is the call that takes them."""
    if params and not _is_pair(params):
        raise ValueError(
            f"parameters of layer {layer} must be a pair (keys, values), which"
            f" kvq.parameters.prepare returns for one layer: {taker}"
        )
    if missing := missing_parameters(plan, params):
        raise ValueError(
            f"{spec!r} needs parameters for {missing} of layer {layer}:"
            f" kvq.parameters.prepare({spec!r}, dims, {layer}, ...) makes them, {taker} takes them"
        )
    if wrong := misshapen_parameter(plan, params):
        raise ValueError(
            f"parameters of layer {layer} are of another spec or model: for {spec!r} {wrong};"
            f" kvq.parameters.prepare({spec!r}, dims, {layer}, ...) makes them"
        )


def _is_pair(params: Tree) -> bool:
    """Return True if these are the parameters of two sides, each with named arrays or empty."""
    return (
        isinstance(params, tuple | list)
        and len(params) == 2
        and all(isinstance(side, Mapping) or not jax.tree.leaves(side) for side in params)
    )


def check_kind(cache: LayerCache) -> None:
    """Raise ValueError if this is not the cache of one layer, or a call has consumed it."""
    check_held(cache)
    if not isinstance(cache, LayerCache):
        raise ValueError(
            f"a plan takes the LayerCache that its init makes, got {type(cache).__name__}"
        )


def check_made(cache: LayerCache, plan: LayerPlan, dtype: str) -> None:
    """Raise ValueError if a layer's cache was consumed, or another plan made it: one with room for
    other tokens or with another dtype would be read in silence."""
    check_kind(cache)
    rows, given = jnp.shape(cache.lengths), _kinds(cache.state)
    wanted = _made(plan, rows[0], dtype) if len(rows) == 1 else {}
    differing = [name for name, kind in wanted.items() if given[name] != kind]
    if any(isinstance(body, PagedBody) for body in cache.state.body):
        differing = [name for name in differing if name != "body"]
    if differing or not wanted:
        raise ValueError(
            f"this cache was not made by this plan ({', '.join(differing) or 'lengths'}):"
            " plan.init(batch) makes one that fits"
        )


@functools.lru_cache(256)
def _made(plan: LayerPlan, batch: int, dtype: str) -> dict[str, Any]:
    return _kinds(plan.layout(batch, dtype))


def _kinds(state: LayerState) -> dict[str, Any]:
    """Return the structure, the shapes and the dtypes of each field of a layer's state."""

    def kind(tree: Tree) -> Any:
        return jax.tree.structure(tree), [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]

    return {f.name: kind(getattr(state, f.name)) for f in dataclasses.fields(state)}


def check_shapes(
    dims: CacheDims,
    new: tuple[int, ...],
    arrays: Mapping[str, Array | None],
    layout: Layout = "BNTH",
) -> None:
    """Raise ValueError if one of the arrays of (B, T) new tokens, by name, does not fit the cache
    or holds no floats, because attention has the dtype of q. Raise NotImplementedError if its type
    tracks the axes of a shard_map, because the loops over a cache start from values that do not.
    None stands for an array, other than q, k and v, that the caller does not have."""
    batch, tokens = new

    def of_heads(count: int) -> tuple[int, ...]:
        middle = (count, tokens) if layout == "BNTH" else (tokens, count)
        return batch, *middle, dims.head_dim

    queries, rows = of_heads(dims.num_attention_heads), of_heads(dims.num_key_value_heads)
    hidden = (batch, tokens, dims.hidden_size)
    wanted: dict[str, tuple[int, ...]] = {
        "q": queries,
        "k": rows,
        "v": rows,
        "x": hidden,
        "residual": hidden,
        "sinks": (dims.num_attention_heads,),
    }
    for name, array in arrays.items():
        if array is None and name not in ("q", "k", "v"):
            continue
        shape = wanted[name.removesuffix("_pre")]
        given = list(getattr(array, "shape", ())) or type(array).__name__
        if array is None or given != list(shape):
            heads, remedy = layout.index("N"), ""
            if len(shape) == len(given) == 4 and given[heads] != shape[heads] == given[3 - heads]:
                remedy = ": swap axes 1 and 2"
                remedy += ', or give layout="BNTH"' if layout == "BTNH" else ""
            raise ValueError(
                f"{name} must have shape {list(shape)} in this step of this cache, got"
                f" {given}{remedy}"
            )
        check_floats(name, array)
        if axes := jax.typeof(array).manual_axis_type.varying:
            raise NotImplementedError(
                f"{name} varies over {sorted(axes)} in a shard_map that checks such types: give"
                " jax.shard_map check_vma=False"
            )


def check_cache_split(placement: Placement | None, lengths: Array, states: Sequence[Any]) -> None:
    """Raise ValueError if the cache of these layers is split over axes of type Explicit and has no
    placement, or is a layout, without arrays."""
    if isinstance(lengths, jax.ShapeDtypeStruct | ArraySpec):
        raise ValueError(
            "this is the layout of a cache, which has no arrays: kvq.init_cache, or a plan's init,"
            " makes them"
        )
    rows = [state.ring[0] for state in states[:1]]
    check_split(placement, {"the cache": rows[0] if rows else None, "the cache's lengths": lengths})


def check_split(placement: Placement | None, arrays: Mapping[str, Array | None]) -> None:
    """Raise ValueError if one of the arrays, by name, is split over axes of type Explicit, and the
    cache has no placement: such axes ask for a sharding of each product."""
    for name, array in arrays.items():
        if placement is None and array is not None and (axes := explicit_axes(array)):
            raise ValueError(
                f"{name} is split over {axes} of a mesh with axes of type Explicit: give layer_plan"
                " or init_cache placement=kvq.Placement(mesh, rows=..., heads=...)"
            )


def new_tokens(
    before: LengthsB,
    capacity: int,
    tokens: int,
    lengths: Integers | None,
    placement: Placement | None,
) -> tuple[PositionsBT, ValidBT]:
    """Return the positions of T new tokens after the first `before` of each row, and a mask of
    those that are stored: the first lengths[b] (default: all) that the capacity has room for.

    A position past the capacity is that of a real token, which is lost. Padding ends below it, but
    for the first token of a row without room: its position is the row's length.
    """
    batch, tokens = before.shape[0], positive("tokens", tokens)
    with crossing(placement) as mesh:
        new = jnp.arange(tokens, dtype=jnp.int32)[None]
        positions = before[:, None] + new
        valid = positions < capacity
        if lengths is not None:
            real = mesh.taken(jnp.asarray(int32("lengths", lengths)))
            if real.shape != (batch,):
                raise ValueError(f"lengths must be [{batch}], got shape {real.shape}")
            check_at_most("lengths", lengths, tokens)
            valid &= new < real[:, None]
            real_or_first = new < jnp.maximum(real, 1)[:, None]
            positions = jnp.where(real_or_first, positions, jnp.minimum(positions, capacity - 1))
        positions, valid = mesh.everywhere((positions, valid))
    return mesh.handed(positions), mesh.handed(valid)


def counted(lengths: LengthsB, valid: ValidBT, placement: Placement | None) -> LengthsB:
    """Return the lengths with the tokens of a step added."""
    with crossing(placement) as mesh:
        added = jnp.sum(mesh.taken(valid), axis=1, dtype=jnp.int32)
        return mesh.everywhere(lengths + added)


def check_static(prefill: bool, implementation: Implementation) -> None:
    """Raise ValueError, in one line, if `prefill` is traced, an array, or not True or False, or
    `implementation` names none."""
    if isinstance(prefill, Tracer):
        raise ValueError("prefill is traced: name it in the static_argnames of your jax.jit")
    if isinstance(prefill, jax.Array | np.ndarray):
        raise ValueError("prefill is an array: give True for a prompt or False, which are static")
    if prefill not in (True, False):
        raise ValueError(f"{prefill=} must be True for a prompt or False for generated tokens")
    named = isinstance(implementation, str) and implementation in ("xla", "pallas", "native")
    if not named and not isinstance(implementation, dispatch.Launch | None):
        raise ValueError(f"{implementation=}: choose 'xla', 'pallas' or 'native'")


def run_layer(
    plan: LayerPlan,
    dims: CacheDims,
    placement: Placement | None,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
    *,
    prefill: bool,
    implementation: Implementation,
    attend: bool = True,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Return (out, state, carry): the attention of new tokens, and the layer's state with them
    added. Shapes are not checked. Raise ValueError if `prefill` is not True or False, or the
    rotation is another than kvq's, such as tables of cosines.

    Without `attend`, the attention is unspecified and not computed: a prompt's attention is the
    same in all caches that it goes into.
    """
    check_static(prefill, implementation)
    if inputs.rope is not None and not isinstance(inputs.rope, Rope):
        raise ValueError(
            "rope must be kvq.types.Rope(inverse_frequencies, attention_factor), got"
            f" {type(inputs.rope).__name__}"
        )
    # The choice depends on the device, so it is made here and not inside `_layer_step`, whose trace
    # equal layers share.
    parts = 1 if placement is None else placement.size("heads")
    route = dispatch.choose(
        implementation,
        plan.share(parts),
        dims.num_attention_heads // parts,
        1 if prefill else inputs.positions.shape[1],
    )
    through, static = _layer_step if attend else _layer_append, (plan, prefill, route)
    if placement is None:
        return through(*static, params, state, inputs, carry)
    with crossing(placement) as mesh:
        arrays = mesh.taken((params, state, inputs, carry))
        out, state, carry = _on_shards(through, placement, dims, *static, *arrays)
    return mesh.handed(out, "batch", "heads", "none", "channels"), state, carry


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # equal layers are traced and lowered once
def _layer_step(
    plan: LayerPlan,
    prefill: bool,
    route: Route,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Take the step through one layer, by XLA on platforms that the route does not serve."""
    layer = prefill_layer if prefill else decode_layer

    def layer_by(route: Route) -> Callable[..., tuple[QueryBNTH, LayerState, Tree]]:
        return lambda params, state, inputs, carry: layer(plan, params, state, inputs, carry, route)

    arrays = params, state, inputs, carry
    if route.only_on is None:
        return layer_by(route)(*arrays)
    branch = {route.only_on: layer_by(route)}
    return lax.platform_dependent(*arrays, **branch, default=layer_by(XLA))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer_append(
    plan: LayerPlan,
    prefill: bool,
    route: Route,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Run `_layer_step`, but return the queries in place of its attention, so that XLA removes the
    attention as dead code."""
    _, after, carry = _layer_step(plan, prefill, route, params, state, inputs, carry)
    return inputs.q_rot, after, carry


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _on_shards(
    through: Callable[..., tuple[QueryBNTH, LayerState, Tree]],
    placement: Placement,
    dims: CacheDims,
    plan: LayerPlan,
    prefill: bool,
    route: Route,
    params: Tree,
    state: LayerState,
    inputs: LayerInputs,
    carry: Tree,
) -> tuple[QueryBNTH, LayerState, Tree]:
    """Run `_layer_step` or `_layer_append` on every shard of a placement."""
    states, carries = state_partition(plan, placement), carry_partition(placement)
    described = functools.partial(parameter_axes, plan, dims, params)
    parameters = parameter_partition(placement, described, params)
    attention = placement.along("batch", "heads", "none", "channels")
    local = functools.partial(through, plan.share(placement.size("heads")), prefill, route)
    run = on_shards(
        local,
        placement,
        (parameters, states, input_partition(placement), carries),
        (attention, states, carries),
    )
    return run(params, state, inputs, carry)
