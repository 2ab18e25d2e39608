"""Take one step of any model through its cache, layer by layer: queries, keys and values of new
tokens go in, attention comes out.

    # T new tokens for each row, and their positions
    step = begin(cache, tokens, lengths, prefill=True)
    # once for each layer, from the first to the last
    out, step = append_and_attend(step, q, k, v)
    # the cache with the tokens added
    cache = finish(step)

All three are pure. Call them inside your model's jitted function, which takes the cache and returns
it. If the cache is donated, or is the carry of a `lax.scan` or `lax.while_loop`, it is updated in
place. `docs/own_model.md` has an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array, Float

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache import call_attention, layer_step
from kvq_jax.cache.cache import Cache, check_cache
from kvq_jax.cache.parameters import parameters_by_layer
from kvq_jax.types.array_types import (
    LayerInputs,
    LengthsB,
    PositionsBT,
    QueryBNTH,
    RowsBKTH,
    Tree,
    ValidBT,
)
from kvq_jax.types.pytree import pytree
from kvq_jax.types.rope import Rope


@pytree
@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """T new tokens on their way through the layers, made by `begin`. A pytree.

    Attributes:
        positions: [B, T] int32, the indices of the new tokens in their sequences, which RoPE takes.
        valid: [B, T] bool, True for the tokens that the cache stores, False for padding and past
            the capacity.
        cache: the cache, whose layers from `layer` on are not yet updated.
        parameters: the method parameters of each layer.
        carry: the value that a cross-layer method carries from layer to layer.
        prefill: True for prompts (static).
        implementation: as in `begin` (static).
        layer: the number of layers that the tokens have passed (static).
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

    A token past the capacity is neither stored nor counted. Its attention is NaN in every layer,
    and so is everything computed from it.

    Args:
        cache: the cache.
        tokens: T, the number of new tokens of each row, padding included.
        lengths: [B] int, the number of real tokens of each row (default: all). The rest is padding
            on the right, and a row of length 0 does not change.
        prefill: static. True for prompts, whose tokens attend to each other in full precision and
            give the prompt statistics of rows that were empty. False for generated tokens, each of
            which sees the cache as if it had come alone.
        parameters: the results of `kvq.parameters.prepare`, one for each layer, for methods that
            need any.
        implementation: static. "xla", "pallas" or "native". None uses kernels if they can run.

    Raises:
        ValueError: in one line, if the cache was consumed, the lengths do not fit the batch or
            the tokens, a static argument is none of its values, or parameters that the cache's
            method needs are missing.
    """
    check_cache(cache)
    layer_step.check_cache_split(cache.placement, cache.lengths, cache.layers)
    layer_step.check_static(prefill, implementation)
    by_layer = parameters_by_layer(cache, parameters)
    for layer, (plan, params) in enumerate(zip(cache.plans, by_layer, strict=True)):
        layer_step.check_parameters(
            str(cache.spec), layer, plan, params, "begin(..., parameters=...)"
        )
    positions, valid = layer_step.new_tokens(
        cache.lengths, cache.capacity, tokens, lengths, cache.placement
    )
    return Step(positions, valid, cache, by_layer, (), prefill, implementation)


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
    sinks: Float[Array, " N"] | None = None,
) -> tuple[QueryBNTH, Step]:
    """Add the new tokens' keys and values to the next layer's cache and return their attention.

        out[b, n, t] = softmax(q[b, n, t] . K / sqrt(H)) V

    over the cached tokens and the new ones up to t, with the window, scale, soft cap and sinks of
    the layer's `Attention`, if it has any. Query head n reads KV head n // (N // K). The attention
    is exact over the sink, the recent window and the other tokens of a prompt. Over the
    body it is the attention over the dequantized keys and values. Sums are accumulated in fp32.

    Args:
        step: the step from `begin`, or from this function for the layer below.
        q: [B, N, T, H], queries after RoPE.
        k: [B, K, T, H], keys after RoPE.
        v: [B, K, T, H], values.
        q_pre: [B, N, T, H], queries before RoPE, for methods that cache keys before RoPE and some
            forms of SQuat.
        k_pre: [B, K, T, H], keys before RoPE, for the same methods.
        x: [B, T, D], the input of the projections, after the norm, for XQuant.
        residual: [B, T, D], the residual stream from which x was normalized, for some forms of
            XQuant-CL.
        rope: the model's rotation, for methods that read q_pre and k_pre, XQuant and subtract_bias.
        sinks: [N], the learned logits of a layer whose attention has sinks.

    Returns:
        (out, step): the attention and the step for the next layer. `out` is [B, N, T, H] in the
        dtype of q, finite and unspecified at padding, and NaN past the capacity. The first token of
        a row of length 0 that is full may be NaN too.

    Raises:
        ValueError: in one line, if a shape does not fit the cache, the method needs an array that
            is missing (the message names it), sinks are missing or the layer has none, the step has
            gone through all layers, or a named implementation cannot run.
    """
    _check_not_through(step)
    arrays = dict(q=q, q_pre=q_pre, k=k, k_pre=k_pre, v=v, x=x, residual=residual, sinks=sinks)
    layer_step.check_shapes(step.cache.dims.at(step.layer), step.positions.shape, arrays)
    layer_step.check_split(step.cache.placement, arrays)
    inputs = LayerInputs(
        x=x,
        q_pre=q_pre,
        q_rot=q,
        k_pre=k_pre,
        k_rot=k,
        v=v,
        positions=step.positions,
        valid=step.valid,
        rope=rope,
        residual=residual,
        sinks=sinks,
    )
    return through_layer(step, inputs)


def through_layer(
    step: Step, inputs: LayerInputs, *, attend: bool = True
) -> tuple[QueryBNTH, Step]:
    """Take the step through the next layer, as `append_and_attend` does.

    For models whose layers make `LayerInputs` of the step's positions and valid tokens. Shapes are
    not checked. Without `attend`, the attention is unspecified and not computed: a prompt's
    attention is the same in all caches that it goes into.
    """
    _check_not_through(step)
    cache = step.cache
    call_attention.check_sinks(step.layer, cache.plans[step.layer].attention.sinks, inputs.sinks)
    out, state, carry = layer_step.run_layer(
        cache.plans[step.layer],
        cache.dims,
        cache.placement,
        step.parameters[step.layer],
        cache.layers[step.layer],
        inputs,
        step.carry,
        prefill=step.prefill,
        implementation=step.implementation,
        attend=attend,
    )
    layers = (*cache.layers[: step.layer], state, *cache.layers[step.layer + 1 :])
    return out, dataclasses.replace(
        step, cache=dataclasses.replace(cache, layers=layers), carry=carry, layer=step.layer + 1
    )


def finish(step: Step) -> Cache:
    """Return the cache with the step's tokens added and counted.

    Args:
        step: the step from `append_and_attend` for the last layer.

    Raises:
        ValueError: if the step has not gone through every layer.
    """
    _check_step(step)
    if step.layer != len(step.cache.layers):
        raise ValueError(
            f"the step went through {step.layer} of {len(step.cache.layers)} layers: call"
            " append_and_attend once for each"
        )
    lengths = layer_step.counted(step.cache.lengths, step.valid, step.cache.placement)
    return dataclasses.replace(step.cache, lengths=lengths)


def _check_step(step: Step) -> None:
    if not isinstance(step, Step):
        raise ValueError(f"this call takes the step of kvq.begin, got {type(step).__name__}")


def _check_not_through(step: Step) -> None:
    """Raise ValueError if it is not a step, or one that has gone through all layers."""
    _check_step(step)
    if step.layer == len(step.cache.layers):
        raise ValueError(
            f"the cache has {len(step.cache.layers)} layers, and the step went through all of"
            " them: finish(step) returns the cache"
        )
