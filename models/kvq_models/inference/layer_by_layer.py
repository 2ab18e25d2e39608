"""Run a model layer by layer from Python, to compare caches that are each used once.

A compiled program of a whole model contains the code of every layer: for 30 layers that is a minute
of compilation for each cache. Here the programs of a layer are compiled once and serve all equal
layers, and the programs outside the cache serve every cache. In exchange, a step costs a dispatch
per layer, and a layer's cache is copied when it is updated. Results equal `prefill` and
`decode_step` up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvq_jax.cache.cache import Cache
from kvq_jax.cache.step import begin, finish, through_layer
from kvq_jax.types.array_types import LengthsB
from kvq_models.inference.checked_input import check_dims
from kvq_models.inference.layers import attention_inputs, finish_layer
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.rope import ropes_for

embed = jax.jit(Llama.embed_tokens)
head = jax.jit(Llama.logits)


def prefill_together(
    llamas: Sequence[Llama],
    caches: Sequence[Cache],
    tokens: Int[Array, "B T"],
    lengths: LengthsB | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Add the same prompts to several empty caches, and return (logits, caches).

    Args:
        llamas: the model with each cache's parameters (`prepare`); they differ in nothing else.
        caches: empty caches for B rows.
        tokens: [B, T] int32, right-padded.
        lengths: [B] int32, tokens of each row, at least 1 (default: T).

    Logits are [B, V] fp32 after each row's last token. Attention inside a prompt is exact for every
    method, so all caches get the same keys and values: the model runs once, and each cache only
    quantizes. The caches equal those of `prefill` up to rounding.

    Raises ValueError if a cache is not empty or was made for another model.
    """
    for llama, cache in zip(llamas, caches, strict=True):
        check_dims(llama, cache)
        if int(cache.lengths.max()):
            raise ValueError(
                f"a cache holds {int(cache.lengths.max())} tokens; prompts that are shared go into"
                " empty caches"
            )
    llama, rope = llamas[0], ropes_for(llamas[0].config, caches[0].capacity)
    steps = [
        begin(
            cache,
            tokens.shape[1],
            lengths,
            prefill=True,
            parameters=parameters_for(prepared, cache.spec),
        )
        for prepared, cache in zip(llamas, caches, strict=True)
    ]
    hidden = embed(llama, tokens)
    for layer in llama.layers:
        inputs = attention_inputs(layer, hidden, steps[0].positions, steps[0].valid, rope)
        attention, first = through_layer(steps[0], inputs)
        steps = [first, *(through_layer(step, inputs, attend=False)[1] for step in steps[1:])]
        hidden = finish_layer(layer, hidden, attention, caches[0].placement)
    last = (
        hidden[:, -1:]
        if lengths is None
        else jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
    )
    return head(llama, last)[:, 0], tuple(finish(step) for step in steps)


def decode(
    llama: Llama, cache: Cache, tokens: Int[Array, "B T"], lengths: LengthsB
) -> tuple[HiddenBTD, Bool[Array, "B T"], Cache]:
    """Add given tokens, `lengths` [B] of each row, as T single steps of `decode_step` would.

    Returns (the last layer's output [B, T, D], a mask of the stored tokens [B, T], the cache). The
    output at a token that was not stored is unspecified.
    """
    rope = ropes_for(llama.config, cache.capacity)
    step = begin(
        cache, tokens.shape[1], lengths, prefill=False, parameters=parameters_for(llama, cache.spec)
    )
    hidden = embed(llama, tokens)
    for layer in llama.layers:
        inputs = attention_inputs(layer, hidden, step.positions, step.valid, rope)
        attention, step = through_layer(step, inputs)
        hidden = finish_layer(layer, hidden, attention, cache.placement)
    return hidden, step.valid, finish(step)
