"""Time decode attention of one layer: one new token per sequence against a cache.

It runs on this machine's first JAX device. The baselines are dense and as good as we know how to
write them: the query heads of a KV head are the rows of one dot product, and K and V are read in
place, never repeated, sliced or copied. They do not even add the new token to a cache, but the
caches do. A program runs several layers, each with its own cache and the queries that the layer
before returned, as a decode step does, because calling a program from Python takes a tenth of a
millisecond, as long as short layers. See docs/decisions/streaming_attention.md.

Caches do not grow: each call adds the same token again, and none quantizes a block.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvq_jax as kvq
from benchmarks.cpu.timing import (
    ATTENTION,
    Candidate,
    Shape,
    add_heads,
    argument_parser,
    first_row,
    layer_plan,
    parsed,
    random_layer,
    random_parameters,
    relative_error,
    run,
    shapes_of,
)
from benchmarks.report_file import arguments
from benchmarks.turns import cycle
from kvq_jax.attention import dispatch, reference
from kvq_jax.attention.dispatch import XLA, Route
from kvq_jax.cache.update import decode_layer
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import Tree
from kvq_jax.types.rope import rotate


def one_dot(
    q: Float[Array, "B K G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    length: Int[Array, ""],
) -> Float[Array, "B K G H"]:
    """Return softmax(q k^T / sqrt(H)) v over the first `length` tokens: two dots and a softmax."""
    return _masked(dot_rows(q, k), v, length, q.shape[-1])


def one_dot_query_first(q: Array, k: Array, v: Array, length: Array) -> Array:
    """Attend like `one_dot`, the operands of the first dot exchanged: the usual way to write it."""
    return _masked(
        jnp.einsum("bkrh,bksh->bkrs", q, k, preferred_element_type=jnp.float32),
        v,
        length,
        q.shape[-1],
    )


def _masked(scores: Float[Array, "B K G S"], v: Array, length: Array, head_dim: int) -> Array:
    seen = jnp.arange(scores.shape[-1]) < length
    scores = jnp.where(seen[None, None, None], scores * head_dim**-0.5, -1e30)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weigh_rows(weights, v) / jnp.sum(weights, axis=-1, keepdims=True)


TOKENS = 8192  # that the layers of a program hold together, or more
BASELINES: tuple[tuple[str, Callable, str], ...] = (
    ("one dot", one_dot, "float32"),
    ("one dot, query first", one_dot_query_first, "float32"),
    ("one dot", one_dot, "bfloat16"),
)


def candidates(shape: Shape, caches: Sequence[str]) -> list[Candidate]:
    """Return the dense baselines, then the caches: as they run on this machine, and on XLA if
    kernels read them."""
    chosen = [_baseline(shape, *baseline) for baseline in BASELINES]
    for spec in caches:
        plan = layer_plan(shape, spec)
        route = dispatch.choose(None, plan, shape.kv_heads * shape.group, 1)
        chosen.append(_cache(shape, spec, plan, route))
        if route != XLA:
            chosen.append(_cache(shape, f"{spec}, xla", plan, XLA))
    return chosen


def _layers(shape: Shape) -> int:
    """Return how many layers a program runs."""
    return max(1, TOKENS // shape.tokens)


def _baseline(shape: Shape, name: str, function: Callable, dtype: str) -> Candidate:
    size = (shape.batch, shape.kv_heads, shape.tokens + 1, shape.head_dim)
    layers = [(_normal(size, dtype, 1), _normal(size, dtype, 2)) for _ in range(_layers(shape))]
    q = _normal((*size[:2], shape.group, size[3]), dtype, 3)
    length = jnp.asarray(shape.tokens + 1, jnp.int32)

    @jax.jit
    def attend(q: Array, layers: Sequence[tuple[Array, Array]], length: Array) -> list[Array]:
        outputs = [q]
        for k, v in layers:
            outputs.append(function(outputs[-1], k, v, length).astype(q.dtype))
        return outputs[1:]

    program = attend.lower(q, layers, length).compile()
    return Candidate(
        f"{name}, {dtype}",
        dtype,
        lambda: jax.block_until_ready(program(q, layers, length)),
        _baseline_error(program(q, layers, length)[0], q, *layers[0]),
        kvq.size.nbytes(layers[0]),
        attend.lower(q, layers[:1], length).compile().memory_analysis(),
        len(layers),
    )


def _baseline_error(output: Array, q: Array, k: Array, v: Array) -> float:
    q, k, v = first_row((q, k, v))
    rows = q.shape[1] * q.shape[2]
    want = reference.attend(q.reshape(1, rows, 1, -1), k, v, jnp.ones((1, 1, k.shape[2]), bool))
    return relative_error(output[:1].reshape(want.shape), want)


def _cache(shape: Shape, name: str, plan: LayerPlan, route: Route) -> Candidate:
    """Return layers of a cache that holds `tokens` tokens of each sequence. A step appends one
    token to each and attends to all, in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(
        states: list[LayerState], inputs: kvq.types.LayerInputs
    ) -> tuple[list[Array], list[LayerState]]:
        outputs, after = [inputs.q_rot], []
        for state in states:
            layer_inputs = dataclasses.replace(inputs, q_rot=outputs[-1])
            out, state, _ = decode_layer(plan, params, state, layer_inputs, (), route)
            outputs.append(out)
            after.append(state)
        return outputs[1:], after

    params = random_parameters(plan)
    states, inputs = (
        [random_layer(plan, shape.batch) for _ in range(_layers(shape))],
        _inputs(shape),
    )
    memory = decode.lower(states[:1], inputs).compile().memory_analysis()
    program = decode.lower(states, inputs).compile()
    outputs, states = program(states, inputs)
    state, row_inputs = first_row((states[0], dataclasses.replace(inputs, rope=None)))
    wanted = attended(plan, params, state, row_inputs, inputs.rope)
    error = relative_error(outputs[0][:1], wanted)
    current_states = [states]

    def step() -> None:
        outputs, current_states[0] = program(current_states[0], inputs)
        jax.block_until_ready(outputs)

    return Candidate(name, "float32", step, error, kvq.size.nbytes(states[0]), memory, len(states))


@functools.partial(jax.jit, static_argnums=0)
def attended(
    plan: LayerPlan,
    params: Tree,
    state: LayerState,
    inputs: kvq.types.LayerInputs,
    rope: kvq.types.Rope,
) -> Array:
    """Return attention by its definition over the rows that a cache stands for."""
    lengths = inputs.positions[:, 0] + 1
    k, v = reference.decode_vectors(plan, params, state, lengths, rope)
    return reference.attend(
        inputs.q_rot, k, v, jnp.arange(k.shape[2])[None, None] < lengths[:, None, None]
    )


def _inputs(shape: Shape) -> kvq.types.LayerInputs:
    heads = shape.kv_heads * shape.group
    q = _normal((shape.batch, heads, 1, shape.head_dim), "float32", 3)
    k, v = (
        _normal((shape.batch, shape.kv_heads, 1, shape.head_dim), "float32", seed)
        for seed in (4, 5)
    )
    positions = jnp.full((shape.batch, 1), shape.tokens, jnp.int32)
    half = shape.head_dim // 2
    rope = kvq.types.Rope(
        jnp.asarray(1e4 ** (-np.arange(half) / half), jnp.float32), jnp.ones((), jnp.float32)
    )
    return kvq.types.LayerInputs(
        None,
        None,
        q,
        k,
        rotate(k, positions, rope),
        v,
        positions,
        jnp.ones((shape.batch, 1), bool),
        rope,
    )


def _normal(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(
        "attention",
        (__doc__ or "").partition("\n")[0],
        tokens=(1024, 4096, 16384),
        batch=(1, 4),
        rounds=15,
    )
    add_heads(parser, (64, 128))
    args = parsed(parser, argv)
    for tokens, spec in itertools.product(args.tokens, args.cache):
        if cycle(spec, tokens, 1).ageing:
            parser.error(
                f"--tokens {tokens}: each call would quantize a block of {spec}; give {tokens + 1}"
            )
    command = (ATTENTION, *arguments(argv))
    run(
        "Decode attention of one layer",
        command,
        shapes_of(args),
        lambda shape: candidates(shape, args.cache),
        args.rounds,
        args.json,
    )


if __name__ == "__main__":
    main()
