"""One step of any model through its cache, layer by layer: queries, keys and values of new tokens
go in, attention comes out.

    step = begin(cache, tokens, lengths, prefill=True)        T new tokens for each row, and their positions
    out, step = append_and_attend(step, q, k, v)              once for each layer, from the first to the last
    cache = finish(step)                                      the cache with the tokens added

All three are pure. Call them inside your model's jitted function, which takes the cache and returns
it: if the cache is donated, or is the carry of a `lax.scan` or `lax.while_loop`, it is updated in
place. `docs/own_model.md` has an example.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import XLA, Implementation, Route
from kvq_jax.cache.cache import Cache, CacheDims, check_held
from kvq_jax.cache.parameters import missing_parameters, parameter_axes
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.placement.crossing import crossing
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.shards import (
    carry_partition,
    input_partition,
    on_shards,
    parameter_partition,
    state_partition,
)
from kvq_jax.types.array_types import (
    LayerInputs,
    LengthsB,
    PositionsBT,
    QueryBNTH,
    RowsBKTH,
    Tree,
    ValidBT,
)
from kvq_jax.types.integers import int32
from kvq_jax.types.pytree import pytree
from kvq_jax.types.rope import Rope


@pytree
@dataclasses.dataclass(frozen=True)
class Step:
    """T new tokens on their way through the layers, made by `begin`. A pytree.

    positions [B, T] int32: indices of the new tokens in their sequences, which RoPE takes. valid
    [B, T] bool: True for the tokens that the cache stores, False for padding and past the capacity.
    layer (static): the number of layers that the tokens have passed. The other fields belong to
    `append_and_attend`: the cache, whose layers from `layer` on are not yet updated; the method
    parameters; and the value that a cross-layer method carries from layer to layer.
    """

    positions: PositionsBT
    valid: ValidBT
    cache: Cache
    parameters: tuple[Tree, ...]
    carry: Tree
    prefill: bool = dataclasses.field(metadata={"static": True})
    implementation: Implementation = dataclasses.field(metadata={"static": True})
    layer: int = dataclasses.field(default=0, metadata={"static": True})


def begin(
    cache: Cache,
    tokens: int,
    lengths: LengthsB | None = None,
    *,
    prefill: bool,
    parameters: Sequence[Tree] = (),
    implementation: Implementation = None,
) -> Step:
    """Return the step that adds `tokens` new tokens to every row of a cache, at positions
    cache.lengths[b] + t.

    lengths [B] int: how many of them are real (default: all); the rest is padding on the right, and
    a row of length 0 does not change. prefill (static): True for prompts, whose tokens attend to
    each other in full precision and give the prompt statistics of rows that were empty; False for
    generated tokens, each of which sees the cache as if it had come alone. parameters: what
    `prepare_layer` returned, one entry for each layer, for methods that need any. implementation
    (static): "xla", "pallas" or "native"; None uses kernels where they can run.

    A token past the capacity is neither stored nor counted. Its attention is NaN in every layer,
    and so is all that follows from it.

    Raises ValueError, in one line, where the cache was consumed, the lengths do not fit the batch,
    or the cache's method needs parameters that are not given.
    """
    check_held(cache)
    if tokens < 1:
        raise ValueError(f"{tokens=} must be at least 1")
    given = tuple(parameters) or ((),) * len(cache.layers)
    if len(given) != len(cache.layers):
        raise ValueError(
            f"parameters must have an entry for each of the {len(cache.layers)} layers, got"
            f" {len(given)}"
        )
    for layer, (plan, own) in enumerate(zip(cache.plans, given, strict=True)):
        missing = missing_parameters(plan, own)
        if missing:
            remedy = (
                f"kvq.prepare_layer({str(cache.spec)!r}, dims, {layer}, ...) makes them, begin(...,"
                " parameters=...) takes them"
            )
            raise ValueError(
                f"{str(cache.spec)!r} needs parameters for {missing} of layer {layer}: {remedy}"
            )
    with crossing(cache.placement) as own:
        new = jnp.arange(tokens, dtype=jnp.int32)[None]
        positions = cache.lengths[:, None] + new
        valid = positions < cache.capacity
        if lengths is not None:
            real = own.taken(jnp.asarray(int32("lengths", lengths)))
            if real.shape != (cache.batch,):
                raise ValueError(f"lengths must be [{cache.batch}], got shape {real.shape}")
            valid &= new < real[:, None]
        positions, valid = own.everywhere((positions, valid))
    return Step(own.handed(positions), own.handed(valid), cache, given, (), prefill, implementation)


def append_and_attend(
    step: Step,
    q: QueryBNTH,
    k: RowsBKTH,
    v: RowsBKTH,
    *,
    q_pre: QueryBNTH | None = None,
    k_pre: RowsBKTH | None = None,
    x: Float[Array, "B T D"] | None = None,
    residual: Float[Array, "B T D"] | None = None,
    rope: Rope | None = None,
) -> tuple[QueryBNTH, Step]:
    """Return (out, step): attention of the new tokens in the next layer, and the step with their
    keys and values in that layer's cache.

        out[b, n, t] = softmax(q[b, n, t] . K / sqrt(H)) V        over the cached tokens and the new ones up to t

    q [B, N, T, H] and k [B, K, T, H] come after RoPE, v [B, K, T, H]; query head n reads KV head n
    // (N // K). out [B, N, T, H] has the dtype of q and is accumulated in fp32; at padding it is
    finite and unspecified, past the capacity NaN. Attention is exact over the sink, the recent
    window and the other tokens of a prompt; over the body it is that of the dequantized keys and
    values.

    Some methods read more: q_pre and k_pre, before RoPE (keys cached before RoPE; some forms of
    SQuat); the model's `rope` (the same, XQuant and subtract_bias); x [B, T, D], the input of the
    projections, after the norm (XQuant); residual [B, T, D], from which x was normalized (some
    forms of XQuant-CL).

    Raises ValueError, in one line, for shapes that do not fit the cache, where the method needs an
    array that is not given (it is named), after the last layer, and where a named implementation
    cannot run.
    """
    return _through_layer(step, q, k, v, q_pre, k_pre, x, residual, rope, attend=True)


def append(
    step: Step,
    k: RowsBKTH,
    v: RowsBKTH,
    *,
    q: QueryBNTH,
    q_pre: QueryBNTH | None = None,
    k_pre: RowsBKTH | None = None,
    x: Float[Array, "B T D"] | None = None,
    residual: Float[Array, "B T D"] | None = None,
    rope: Rope | None = None,
) -> Step:
    """Return the step of `append_and_attend` without its attention, which is not computed: for a
    prompt that goes into several caches, and whose attention is the same in all of them. Arguments
    and errors are those of `append_and_attend`.
    """
    return _through_layer(step, q, k, v, q_pre, k_pre, x, residual, rope, attend=False)[1]


def _through_layer(
    step: Step,
    q: QueryBNTH,
    k: RowsBKTH,
    v: RowsBKTH,
    q_pre: QueryBNTH | None,
    k_pre: RowsBKTH | None,
    x: Float[Array, "B T D"] | None,
    residual: Float[Array, "B T D"] | None,
    rope: Rope | None,
    *,
    attend: bool,
) -> tuple[QueryBNTH, Step]:
    cache = step.cache
    if step.layer == len(cache.layers):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, and the step went through all of them:"
            " finish(step) returns the cache"
        )
    dims, (batch, tokens) = cache.dims, step.positions.shape
    queries = (batch, dims.num_attention_heads, tokens, dims.head_dim)
    rows = (batch, dims.num_key_value_heads, tokens, dims.head_dim)
    hidden = (batch, tokens, dims.hidden_size)
    wanted = (
        ("q", q, queries),
        ("q_pre", q_pre, queries),
        ("k", k, rows),
        ("k_pre", k_pre, rows),
        ("v", v, rows),
    )
    for name, array, shape in (*wanted, ("x", x, hidden), ("residual", residual, hidden)):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} in this step of this cache, got"
                f" {list(array.shape)}"
            )
    inputs = LayerInputs(x, q_pre, q, k_pre, k, v, step.positions, step.valid, rope, residual)
    plan, state = cache.plans[step.layer], cache.layers[step.layer]
    layer_parameters = step.parameters[step.layer]
    # The choice depends on the device, so it is made here and not inside `_layer_step`, whose trace
    # equal layers share.
    parts = 1 if cache.placement is None else cache.placement.size("heads")
    route = dispatch.choose(
        step.implementation,
        plan.share(parts),
        dims.num_attention_heads // parts,
        1 if step.prefill else tokens,
    )
    static = plan, step.prefill, route
    if cache.placement is None:
        through = _layer_step if attend else _layer_append
        out, state, carry = through(*static, layer_parameters, state, inputs, step.carry)
    else:
        with crossing(cache.placement) as mesh:
            arrays = mesh.taken((layer_parameters, state, inputs, step.carry))
            out, state, carry = _layer_step_on_shards(cache.placement, dims, *static, *arrays)
        out = mesh.handed(out, "batch", "heads", "none", "channels")
    layers = (*cache.layers[: step.layer], state, *cache.layers[step.layer + 1 :])
    return out, dataclasses.replace(
        step, cache=dataclasses.replace(cache, layers=layers), carry=carry, layer=step.layer + 1
    )


def finish(step: Step) -> Cache:
    """Return the cache with the step's tokens added and counted. Raises ValueError where the step
    has not gone through every layer."""
    if step.layer != len(step.cache.layers):
        raise ValueError(
            f"the step went through {step.layer} of {len(step.cache.layers)} layers: call"
            " append_and_attend once for each"
        )
    with crossing(step.cache.placement) as own:
        added = jnp.sum(own.taken(step.valid), axis=1, dtype=jnp.int32)
        return dataclasses.replace(step.cache, lengths=own.everywhere(step.cache.lengths + added))


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
    """Take one layer, by XLA on platforms that the route does not serve."""
    layer = prefill_layer if prefill else decode_layer

    def by(route: Route) -> Callable[..., tuple[QueryBNTH, LayerState, Tree]]:
        return lambda params, state, inputs, carry: layer(plan, params, state, inputs, carry, route)

    arrays = params, state, inputs, carry
    if route.only_on is None:
        return by(route)(*arrays)
    branch = {route.only_on: by(route)}
    return lax.platform_dependent(*arrays, **branch, default=by(XLA))


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
    """Run `_layer_step` with its queries in the place of its attention, which is dead code then:
    XLA leaves it out."""
    _, after, carry = _layer_step(plan, prefill, route, params, state, inputs, carry)
    return inputs.q_rot, after, carry


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _layer_step_on_shards(
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
    """Run `_layer_step` on every shard of a placement."""
    states, carries = state_partition(plan, placement), carry_partition(placement)
    own = parameter_partition(
        plan, placement, functools.partial(parameter_axes, plan, dims, params), params
    )
    attention = placement.along("batch", "heads", "none", "channels")
    local = functools.partial(_layer_step, plan.share(placement.size("heads")), prefill, route)
    run = on_shards(
        local,
        placement,
        (own, states, input_partition(placement), carries),
        (attention, states, carries),
    )
    return run(params, state, inputs, carry)
