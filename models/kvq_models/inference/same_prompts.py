"""Prefill the same prompts into several caches with one forward pass, where caches are compared."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int

from kvq_jax.array_types import Tree
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.step import append_and_attend, begin, finish
from kvq_models.inference.decoding import check_dims, finish_by_chunks
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import Llama
from kvq_models.llama.rope import rope_for


def prefill_together(
    llamas: Sequence[Llama], caches: Sequence[Cache], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Add the same prompts [B, T] to empty caches, and return (logits [B, V] fp32 after the last token, the caches).

    Attention inside a prompt is exact for every method, so all caches are given the same keys and values: the model runs once, and each
    cache only quantizes. The caches are those that `prefill` returns, to rounding, and their buffers are consumed.

    llamas: the model with what each cache needs (`prepare`); they differ in nothing else. Raises ValueError where a cache is not empty or
    was made for another model.
    """
    for llama, cache in zip(llamas, caches, strict=True):
        check_dims(llama, cache)
        if int(cache.lengths.max()):
            raise ValueError(f"a cache holds {int(cache.lengths.max())} tokens; prompts that are shared go into empty caches")
    parameters = tuple(parameters_for(llama, cache.spec) for llama, cache in zip(llamas, caches, strict=True))
    return _prefill(llamas[0], parameters, tuple(caches), tokens)


@functools.partial(jax.jit, donate_argnames="caches")
def _prefill(
    llama: Llama, parameters: tuple[tuple[Tree, ...], ...], caches: tuple[Cache, ...], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    rope, hidden = rope_for(llama.config, caches[0].capacity), llama.embed_tokens(tokens)
    steps = [begin(cache, tokens.shape[1], prefill=True, parameters=own) for cache, own in zip(caches, parameters, strict=True)]
    for layer in llama.layers:
        own = layer.attention_inputs(hidden, steps[0].positions, steps[0].valid, rope)
        # The caches are empty, so every output is the same exact attention; the compiler removes those that nothing reads.
        (attention, *_), steps = zip(
            *(
                append_and_attend(
                    step, own.q_rot, own.k_rot, own.v, q_pre=own.q_pre, k_pre=own.k_pre, x=own.x, residual=own.residual, rope=rope
                )
                for step in steps
            ),
            strict=True,
        )
        hidden = finish_by_chunks(layer.finish, hidden, attention)
    return llama.logits(hidden[:, -1:])[:, 0], tuple(finish(step) for step in steps)
