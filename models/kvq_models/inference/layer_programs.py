"""The programs that take new tokens through a model layer by layer. Each takes the arrays of its
part of the model and of the cache as flat lists, and equal layers have the same program.

Which arrays a layer takes is found once for a model and a cache of given structures. A call then
flattens both once, and starts a program with lists: tens of microseconds for each layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_jax.cache.dims import CacheDims
from kvq_jax.cache.layer_step import check_parameters, counted, new_tokens, run_layer
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.placement.crossing import crossing
from kvq_jax.placement.placement import Placement
from kvq_jax.types.array_types import LayerInputs, LengthsB, PositionsBT, Tree, ValidBT
from kvq_models.inference.layers import attention_inputs, finish_layer, first_input, residual_split
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.llama.model import HiddenBTD, Llama
from kvq_models.llama.rope import ropes_for

Arrays: TypeAlias = list[Any]  # the leaves of a part of a model or of a cache
Structure: TypeAlias = Any  # a PyTreeDef, which must be hashable
Program: TypeAlias = Any  # a jitted function

# Most programs of a kind that are kept. Each takes megabytes, and callers choose specs, capacities
# and models: a process that goes through more of them compiles the least recently used again.
PROGRAMS = 256


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """Options for passing tokens through the layers of a cache.

    prefill, implementation: as in `begin`. attends: False to append the inputs that another cache's
    layers had, without attention. shares: True to hand out these inputs.
    """

    prefill: bool
    implementation: Implementation = None
    attends: bool = True
    shares: bool = False


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The program of a layer, and the leaves of the model and of the cache that it takes."""

    program: Program
    weights: list[int]
    parameters: list[int]
    state: list[int]


@dataclasses.dataclass(frozen=True)
class Calls:
    """The programs of a model and a cache. `outside` are the leaves of the model that belong to no
    layer, which `first` and `last` take."""

    outside: list[int]
    first: Program
    layers: list[LayerCall]
    last: Program


@functools.lru_cache(PROGRAMS)
def calls(model: Structure, cached: Structure, options: PassOptions) -> Calls:
    """Return the programs of a model and a cache of these structures. Raise ValueError if the model
    lacks parameters that the cache needs."""
    llama: Llama = model.unflatten(range(model.num_leaves))
    cache: Cache = cached.unflatten(range(cached.num_leaves))
    by_layer = parameters_for(llama, cache.spec)
    static = cache.dims, cache.capacity, cache.placement, options
    program_of = _attending if options.attends else _appending
    of_layers = []
    for number, plan in enumerate(cache.plans):
        params = by_layer[number]
        check_parameters(str(cache.spec), number, plan, params, "kvq_models.prepare")
        weights, layer = jax.tree.flatten(llama.layers[number])
        parameters, of_parameters = jax.tree.flatten(params)
        state, of_state = jax.tree.flatten(cache.layers[number])
        program = program_of(LayerKind(layer, of_parameters, of_state, plan, *static))
        of_layers.append(LayerCall(program, weights, parameters, state))
    inside = set(jax.tree.leaves((llama.layers, llama.cache_parameters)))
    outside = [i for i in range(model.num_leaves) if i not in inside]
    first = _first(model, tuple(outside), cache.capacity, cache.placement)
    return Calls(outside, first, of_layers, _last(model, tuple(outside)))


@functools.lru_cache(PROGRAMS)
def _first(
    model: Structure, outside: tuple[int, ...], capacity: int, placement: Placement | None
) -> Program:
    """Return the program that makes the first layer's input, the positions of new tokens, the mask
    of those that are stored, and the lengths with them."""

    def first(
        arrays: Arrays, before: LengthsB, tokens: Array, lengths: LengthsB
    ) -> tuple[HiddenBTD, PositionsBT, ValidBT, LengthsB]:
        with crossing(placement) as mesh:
            arrays, before, tokens, lengths = mesh.taken((arrays, before, tokens, lengths))
            positions, valid = new_tokens(before, capacity, tokens.shape[1], lengths, placement)
            llama = _without_layers(model, outside, arrays)
            hidden = residual_split(placement)(first_input(llama, tokens, valid, placement))
            return hidden, positions, valid, counted(before, valid, placement)

    return jax.jit(first, donate_argnames="before")


@functools.lru_cache(PROGRAMS)
def _last(model: Structure, outside: tuple[int, ...]) -> Program:
    """Return the program of `prompt_logits`."""

    def last(
        arrays: Arrays, hidden: HiddenBTD, stored: ValidBT, lengths: LengthsB, all_logits: bool
    ) -> Array:
        llama = _without_layers(model, outside, arrays)
        return prompt_logits(llama, hidden, stored, lengths, all_logits)

    return jax.jit(last, static_argnums=4)


def prompt_logits(
    llama: Llama, hidden: HiddenBTD, stored: ValidBT, lengths: LengthsB, all_logits: bool
) -> Float[Array, "..."]:
    """Return the logits of the last layer's output, as `prefill` does."""
    if all_logits:
        return jnp.where(stored[..., None], llama.logits(hidden), jnp.nan)
    last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    return jnp.where(lengths[:, None] > 0, llama.logits(last)[:, 0], jnp.nan)


def _without_layers(model: Structure, outside: Sequence[int], arrays: Arrays) -> Llama:
    """Return the model with None for every array of its layers."""
    given = dict(zip(outside, arrays, strict=True))
    return model.unflatten([given.get(i) for i in range(model.num_leaves)])


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Everything that the program of a layer depends on besides the shapes of its arrays."""

    layer: Structure
    parameters: Structure
    state: Structure
    plan: LayerPlan
    dims: CacheDims
    capacity: int
    placement: Placement | None
    options: PassOptions

    def cached(
        self, parameters: Arrays, state: Arrays, inputs: LayerInputs, carry: Tree
    ) -> tuple[Array, Arrays, Tree]:
        """Return the attention, the state with the new tokens, and what the next layer gets."""
        out, after, carry = run_layer(
            self.plan,
            self.dims,
            self.placement,
            self.parameters.unflatten(parameters),
            self.state.unflatten(state),
            inputs,
            carry,
            prefill=self.options.prefill,
            implementation=self.options.implementation,
            attend=self.options.attends,
        )
        return out, jax.tree.leaves(after), carry


@functools.lru_cache(PROGRAMS)
def _attending(kind: LayerKind) -> Program:
    """Return the program of a whole layer."""
    placement = kind.placement

    def run(
        weights: Arrays,
        parameters: Arrays,
        state: Arrays,
        hidden: HiddenBTD,
        positions: PositionsBT,
        valid: ValidBT,
        carry: Tree,
    ) -> tuple[HiddenBTD, Arrays, Tree, LayerInputs | None]:
        with crossing(placement) as mesh:
            weights, parameters, state, hidden, positions, valid, carry = mesh.taken(
                (weights, parameters, state, hidden, positions, valid, carry)
            )
            layer = kind.layer.unflatten(weights)
            rope = ropes_for(layer.config, kind.capacity)
            inputs = attention_inputs(layer, hidden, positions, valid, rope, placement)
            attention, state, carry = kind.cached(parameters, state, inputs, carry)
            hidden = residual_split(placement)(finish_layer(layer, hidden, attention, placement))
            return hidden, state, carry, inputs if kind.options.shares else None

    return jax.jit(run, donate_argnames=("state", "hidden"))


@functools.lru_cache(PROGRAMS)
def _appending(kind: LayerKind) -> Program:
    """Return the program that appends the inputs of another cache's layer, without attention."""

    def append(
        parameters: Arrays, state: Arrays, inputs: LayerInputs, carry: Tree
    ) -> tuple[Arrays, Tree]:
        with crossing(kind.placement) as mesh:
            return kind.cached(*mesh.taken((parameters, state, inputs, carry)))[1:]

    return jax.jit(append, donate_argnames="state")
