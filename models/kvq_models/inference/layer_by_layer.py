"""Run a model layer by layer from Python: prompts on a CPU, and comparisons of caches that are each
used once.

A compiled program of a whole model contains the code of every layer: for 30 layers that is half a
gigabyte, and a dozen seconds of compilation for each cache. Here the program of a layer is compiled
once and serves all equal layers (layer_programs.py). Caches are consumed layer by layer. A layer
does what it does in `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache, check_held
from kvq_jax.types.array_types import LayerInputs, LengthsB, ValidBT
from kvq_models.inference.checked_input import check_dims
from kvq_models.inference.layer_programs import Arrays, LayerCall, PassOptions, calls
from kvq_models.llama.model import HiddenBTD, Llama

NewTokens: TypeAlias = Int[Array | np.ndarray, "B T"]
NewLengths: TypeAlias = Int[Array | np.ndarray, "B"]  # number of real tokens in each row


class LayersOutput(NamedTuple):
    """Tokens [B, T] that went through all layers: the last layer's output [B, T, D], unspecified at
    tokens that are not stored, a mask of those that are, [B, T], and the cache with them."""

    hidden: HiddenBTD
    stored: ValidBT
    cache: Cache


class Layers:
    """A model and a cache as the arrays that the programs of the layers take. A cache goes through
    the layers once."""

    def __init__(self, llama: Llama, cache: Cache, options: PassOptions):
        self._weights, model = jax.tree.flatten(llama)
        self._held, self._cached = jax.tree.flatten(cache)
        self._calls, self._lengths = calls(model, self._cached, options), cache.lengths
        self._outside = [self._weights[i] for i in self._calls.outside]
        self._appended, self._carry = list[Arrays](), ()

    def through(
        self,
        tokens: NewTokens,
        lengths: NewLengths,
        share: Callable[[LayerInputs], None] | None = None,
    ) -> LayersOutput:
        """Add `lengths` [B] tokens of each row. `share` gets the inputs of each layer."""
        hidden, positions, stored, counts = self._calls.first(
            self._outside, self._lengths, tokens, lengths
        )
        for call in self._calls.layers:
            hidden, state, self._carry, inputs = call.program(
                self._weights_of(call),
                *self._cached_of(call),
                hidden,
                positions,
                stored,
                self._carry,
            )
            self._appended.append(state)
            if share is not None:
                share(inputs)
        return LayersOutput(hidden, stored, self.filled(counts))

    def append(self, inputs: LayerInputs) -> None:
        """Append the inputs of another cache's layer to the next one."""
        call = self._calls.layers[len(self._appended)]
        state, self._carry = call.program(*self._cached_of(call), inputs, self._carry)
        self._appended.append(state)

    def filled(self, counts: LengthsB) -> Cache:
        """Return the cache after all layers, with `counts` tokens in each row."""
        leaves: list[Any] = [counts] * len(self._held)
        for call, state in zip(self._calls.layers, self._appended, strict=True):
            for at, array in zip(call.state, state, strict=True):
                leaves[at] = array
        return self._cached.unflatten(leaves)

    def logits(
        self, output: LayersOutput, lengths: NewLengths, *, all_logits: bool = False
    ) -> Float[Array, "..."]:
        """Return the logits after each row's last token, or after all tokens, as `prefill` does."""
        return self._calls.last(self._outside, output.hidden, output.stored, lengths, all_logits)

    def lowered(
        self, tokens: NewTokens, lengths: NewLengths, *, all_logits: bool = False
    ) -> list[Lowered]:
        """Return the programs of `through` and `logits`, each once. Nothing is consumed."""
        first = self._calls.first.lower(self._outside, self._lengths, tokens, lengths)
        hidden, positions, stored, _ = _described(first)
        programs, carry = {}, ()
        for call in self._calls.layers:
            arrays = (
                self._weights_of(call),
                *self._cached_of(call),
                hidden,
                positions,
                stored,
                carry,
            )
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arrays))
            kind = call.program, jax.tree.structure(arrays), shapes
            if kind not in programs:
                programs[kind] = call.program.lower(*arrays)
            carry = _described(programs[kind])[2]
        last = self._calls.last.lower(self._outside, hidden, stored, lengths, all_logits)
        return [first, *programs.values(), last]

    def _weights_of(self, call: LayerCall) -> Arrays:
        return [self._weights[i] for i in call.weights]

    def _cached_of(self, call: LayerCall) -> tuple[Arrays, Arrays]:
        """Return the parameters and the state of a layer."""
        return [self._weights[i] for i in call.parameters], [self._held[i] for i in call.state]


def _described(lowered: Lowered) -> Any:
    return jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info)


def prompt_layers(llama: Llama, cache: Cache, implementation: Implementation = None) -> Layers:
    """Return the layers as a prompt goes through them."""
    return Layers(llama, cache, PassOptions(prefill=True, implementation=implementation))


def prefill_together(
    llamas: Sequence[Llama],
    caches: Sequence[Cache],
    tokens: NewTokens,
    lengths: NewLengths | None = None,
) -> tuple[Float[Array, "B V"], tuple[Cache, ...]]:
    """Add the same prompts to several empty caches, which are consumed, and return (logits,
    caches).

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
    if lengths is None:
        lengths = np.full(len(tokens), tokens.shape[1], np.int32)
    first = Layers(llamas[0], caches[0], PassOptions(prefill=True, shares=len(caches) > 1))
    others = [
        Layers(llama, cache, PassOptions(prefill=True, attends=False))
        for llama, cache in zip(llamas[1:], caches[1:], strict=True)
    ]

    def share(inputs: LayerInputs) -> None:
        for other in others:
            other.append(inputs)

    output = first.through(tokens, lengths, share if others else None)
    # each cache has lengths of its own
    filled = [other.filled(output.cache.lengths + 0) for other in others]
    return first.logits(output, lengths), (output.cache, *filled)


def decode(llama: Llama, cache: Cache, tokens: NewTokens, lengths: NewLengths) -> LayersOutput:
    """Add given tokens, `lengths` [B] of each row, as T single steps of `decode_step` would. The
    cache is consumed."""
    check_held(cache)
    return Layers(llama, cache, PassOptions(prefill=False)).through(tokens, lengths)
