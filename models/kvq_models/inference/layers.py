"""Run the layers of a model over the tokens of a step, between `begin` and `finish` of a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvq_jax.attention.dispatch import Launch
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.step import Step, finish, through_layer
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import LayerInputs, ValidBT
from kvq_models.llama.model import HiddenBTD, Layer, Llama
from kvq_models.llama.rope import ropes_for
from kvq_models.llama.sharding import embedded

FINISH_CHUNK = 512  # tokens whose MLP activations exist at a time


def run_layers(llama: Llama, step: Step, tokens: Int[Array, "B T"]) -> tuple[HiddenBTD, Cache]:
    """Run all layers over the tokens of a step."""
    rope, placement = ropes_for(llama.config, step.cache.capacity), step.cache.placement
    positions, valid, split = step.positions, step.valid, residual_split(placement)
    hidden = split(first_input(llama, tokens, valid, placement))
    if twice := tokens.size == 1 and placement is None and _on_gpu(step):
        hidden, positions, valid = lax.optimization_barrier(
            jax.tree.map(lambda a: jnp.repeat(a, 2, axis=0), (hidden, positions, valid))
        )
    for layer in llama.layers:
        inputs = attention_inputs(layer, hidden, positions, valid, rope, placement)
        inputs = _first_row(inputs) if twice else inputs
        attention, step = through_layer(step, inputs)
        hidden = split(finish_layer(layer, hidden, attention, placement))
    return hidden[: len(tokens)], finish(step)


def first_input(
    llama: Llama, tokens: Int[Array, "B T"], valid: ValidBT, placement: Placement | None
) -> HiddenBTD:
    """Return the first layer's input. It is zero for padding and for vacant rows, and remains so,
    because packed products skip rows of zeros."""
    return jnp.where(valid[..., None], embedded(llama, tokens, placement), 0)


def _on_gpu(step: Step) -> bool:
    """Return True if a step runs on a GPU. A single row is duplicated there: XLA would compute
    norms and projections of one row from products and sums, which are separate launches, and write
    all weights of k and v times x (docs/kernels.md).
    """
    return isinstance(step.implementation, Launch) or jax.default_backend() == "gpu"


def _first_row(inputs: LayerInputs) -> LayerInputs:
    """Return the inputs of the first row. The rotation and the sinks have no rows."""
    rows = jax.tree.map(lambda a: a[:1], dataclasses.replace(inputs, rope=None, sinks=None))
    return dataclasses.replace(rows, rope=inputs.rope, sinks=inputs.sinks)


def residual_split(placement: Placement | None) -> Callable[[HiddenBTD], HiddenBTD]:
    """Return the identity on the residual stream, constrained on a mesh so that every device has
    the whole stream of the rows it serves."""
    if placement is None:
        return lambda hidden: hidden
    return lambda hidden: placement.constrained(hidden, "batch", "none", "model")


# Jitted for callers that run layers one by one, and so that the trace and the code of equal layers
# exist once, as with _layer_step of kvq_jax/cache/layer_step.py.
embed = jax.jit(Llama.embed_tokens)
head = jax.jit(Llama.logits)
attention_inputs = jax.jit(Layer.attention_inputs, static_argnames="placement")


@functools.partial(jax.jit, static_argnames="placement")
def finish_layer(
    layer: Layer,
    hidden: HiddenBTD,
    attention: Float[Array, "#B N T H"],
    placement: Placement | None = None,
) -> HiddenBTD:
    """Run layer.finish in chunks of tokens, so that the MLP's wide activations never exist for a
    whole prompt."""
    length = hidden.shape[1]
    chunks = -(-length // FINISH_CHUNK)
    if chunks == 1:
        return layer.finish(hidden, attention, placement)
    padding = chunks * FINISH_CHUNK - length
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    attention = jnp.pad(attention, ((0, 0), (0, 0), (0, padding), (0, 0)))

    def finish_chunk(i: Array) -> HiddenBTD:
        at = i * FINISH_CHUNK
        return layer.finish(
            lax.dynamic_slice_in_dim(hidden, at, FINISH_CHUNK, 1),
            lax.dynamic_slice_in_dim(attention, at, FINISH_CHUNK, 2),
            placement,
        )

    done = jnp.moveaxis(lax.map(finish_chunk, jnp.arange(chunks, dtype=jnp.int32)), 0, 1)
    return done.reshape(hidden.shape)[:, :length]
