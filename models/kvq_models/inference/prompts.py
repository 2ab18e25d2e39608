"""Read prompts: layer by layer on one CPU, elsewhere by one program of all layers
(docs/decisions/prompts.md)."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.core import Tracer
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.step import begin
from kvq_jax.placement.crossing import crossing
from kvq_jax.types.array_types import LengthsB
from kvq_models.inference.layer_by_layer import LayersOutput, NewLengths, NewTokens, prompt_layers
from kvq_models.inference.layer_programs import prompt_logits
from kvq_models.inference.layers import run_layers
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Llama


def read_prompt(
    llama: Llama,
    cache: Cache,
    tokens: NewTokens,
    lengths: NewLengths,
    *,
    all_logits: bool = False,
    implementation: Implementation = None,
) -> tuple[Float[Array, "..."], Cache]:
    """Do what `prefill` does, without its checks. The cache is consumed."""
    if not by_layers(llama, cache, tokens, lengths):
        return prompt_program(
            llama, cache, tokens, lengths, all_logits=all_logits, implementation=implementation
        )
    layers = prompt_layers(llama, cache, implementation)
    output = layers.through(tokens, lengths)
    return layers.logits(output, lengths, all_logits=all_logits), output.cache


def lowered_prompt(
    llama: Llama,
    cache: Cache,
    tokens: NewTokens,
    lengths: NewLengths,
    *,
    all_logits: bool = False,
    implementation: Implementation = None,
) -> list[Lowered]:
    """Return the programs of `read_prompt`, to be compiled. Nothing is consumed."""
    if not by_layers(llama, cache, tokens, lengths):
        return [
            prompt_program.lower(
                llama, cache, tokens, lengths, all_logits=all_logits, implementation=implementation
            )
        ]
    layers = prompt_layers(llama, cache, implementation)
    return layers.lowered(tokens, lengths, all_logits=all_logits)


def by_layers(llama: Llama, cache: Cache, *arrays: Any) -> bool:
    """Return True if a prompt is read layer by layer: on one CPU, outside a caller's jit."""
    if cache.placement is not None or jax.default_backend() != "cpu":
        return False
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((llama, cache, arrays)))


@functools.partial(
    jax.jit, static_argnames=("all_logits", "implementation"), donate_argnames="cache"
)
def prompt_program(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: LengthsB,
    *,
    all_logits: bool = False,
    implementation: Implementation = None,
) -> tuple[Float[Array, "..."], Cache]:
    """Do what `read_prompt` does, by one program."""
    with crossing(cache.placement) as mesh:
        llama, cache, tokens, lengths = mesh.taken((llama, cache, tokens, lengths))
        output = _through_layers(llama, cache, tokens, lengths, implementation)
        logits = prompt_logits(llama, output.hidden, output.stored, lengths, all_logits)
        return logits, output.cache


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def hidden_program(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: LengthsB,
    *,
    implementation: Implementation = None,
) -> tuple[HiddenBTD, Cache]:
    """Do what `read_hidden` does, by one program."""
    with crossing(cache.placement) as mesh:
        llama, cache, tokens, lengths = mesh.taken((llama, cache, tokens, lengths))
        output = _through_layers(llama, cache, tokens, lengths, implementation)
        return output.hidden, output.cache


def _through_layers(
    llama: Llama,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: LengthsB,
    implementation: Implementation,
) -> LayersOutput:
    step = begin(
        cache,
        tokens.shape[1],
        lengths,
        prefill=True,
        parameters=parameters_for(llama, cache.spec),
        implementation=implementation,
    )
    hidden, cache = run_layers(llama, step, tokens)
    return LayersOutput(hidden, step.valid, cache)


def read_hidden(
    llama: Llama,
    cache: Cache,
    tokens: NewTokens,
    lengths: NewLengths,
    implementation: Implementation = None,
) -> tuple[HiddenBTD, Cache]:
    """Do what `read_prompt` does, but return the last layer's output in place of the logits."""
    if not by_layers(llama, cache, tokens, lengths):
        return hidden_program(llama, cache, tokens, lengths, implementation=implementation)
    output = prompt_layers(llama, cache, implementation).through(tokens, lengths)
    return output.hidden, output.cache
