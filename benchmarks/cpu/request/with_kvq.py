"""Measure kvq. The ways are `SPEC`, `SPEC, int8 activations`, `attention of a layer, SPEC`, and
`attention of a layer, products alone`: the bound of its multiplications."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from benchmarks.cpu.request.child import Request, measured_by, request_times, timed
from benchmarks.cpu.request.plan import ATTENTION, PRODUCTS
from kvq_models import prepare
from kvq_models.inference.generation import STREAM_STEPS, advance, begun, generation_settings
from kvq_models.inference.prompts import lowered_prompt, read_prompt
from kvq_models.llama.checkpoint import load_weights, open_checkpoint
from kvq_models.llama.flat_llama import FlatLlama

INT8 = ", int8 activations"
SIDES = 512, 1024, 2048  # of the square matrices whose products are timed


def measure(request: Request) -> dict[str, Any]:
    """Measure as `kvq generate` computes: a prompt layer by layer, then tokens in segments."""
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(request.folder, "programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    named = {"version": f"{kvq.__version__}, JAX {jax.__version__}"}
    if request.way == PRODUCTS:
        return {**named, **_products(request)}
    if request.way.startswith(ATTENTION):
        return {**named, **_attention(request)}
    spec = request.way.removesuffix(INT8)
    activations = "int8" if request.way.endswith(INT8) else "float32"
    checkpoint = open_checkpoint(request.model)
    weights = load_weights(checkpoint, dtype="float32", weights="packed", activations=activations)
    llama = prepare(weights, spec)
    model = FlatLlama(llama)
    calls = -(-request.steps // STREAM_STEPS)
    maximum = STREAM_STEPS * (calls + 1)
    cache = kvq.init_cache(spec, llama.config, 1, request.prompt + maximum, "float32")
    settings = generation_settings(maximum)
    tokens = np.asarray([request.prompt_ids()], np.int32)
    lengths = np.asarray([request.prompt], np.int32)
    for program in lowered_prompt(llama, cache, tokens, lengths):
        program.compile()
    logits = jnp.zeros((1, llama.config.vocab_size), jnp.float32)
    looping = advance.lower(model, begun(cache, logits, maximum), settings, jnp.int32(0)).compile()
    if request.warm:
        return named
    state: list[Any] = []
    del cache

    def reset() -> None:
        state.clear()
        empty = kvq.init_cache(spec, llama.config, 1, request.prompt + maximum, "float32")
        state.append(jax.block_until_ready(empty))

    def until(tokens: int) -> None:
        state[:] = [looping(model, state[0], settings, jnp.int32(tokens))]
        jax.block_until_ready(state[0].tokens)

    def first_token() -> None:
        logits, read = read_prompt(llama, state.pop(), tokens, lengths)
        state[:] = [begun(read, logits, maximum)]
        until(1)

    generated = iter(range(STREAM_STEPS, maximum + 1, STREAM_STEPS))
    times = request_times(
        first_token,
        lambda: until(next(generated)),
        calls,
        STREAM_STEPS,
        readings=request.readings,
        reset=reset,
    )
    return {**named, **times}


def _layer_of(request: Request) -> kvq.CacheDims:
    """Return the sizes of one layer of the request's model."""
    config = open_checkpoint(request.model).config
    return kvq.CacheDims(
        1,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )


def _attention(request: Request) -> dict[str, Any]:
    """Measure append and attend of one layer of the model."""
    dims = _layer_of(request)
    heads, kv_heads, head_dim = dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim
    capacity = request.prompt + request.steps + 2
    spec = request.way.removeprefix(ATTENTION)

    def empty() -> Any:
        return kvq.init_cache(spec, dims, 1, capacity, "float32")

    random = np.random.default_rng(0)

    def rows(tokens: int) -> tuple[jax.Array, ...]:
        shapes = [(1, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads)]
        return tuple(jnp.asarray(random.standard_normal(s, np.float32)) for s in shapes)

    def program(prefill: bool) -> Callable[..., Any]:
        def run(cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            step = kvq.begin(cache, q.shape[2], prefill=prefill)
            out, step = kvq.append_and_attend(step, q, k, v)
            return out, kvq.finish(step)

        arrays = prompt if prefill else one
        return jax.jit(run, donate_argnums=0).lower(empty(), *arrays).compile()

    prompt, one = rows(request.prompt), rows(1)
    reading, stepping = program(True), program(False)
    state: list[Any] = []
    if request.warm:
        return {}

    def reset() -> None:
        state[:] = [jax.block_until_ready(empty())]

    def run(compiled: Any, arrays: tuple[jax.Array, ...]) -> None:
        state[:] = [jax.block_until_ready(compiled(state[0], *arrays))[1]]

    return request_times(
        lambda: run(reading, prompt),
        lambda: run(stepping, one),
        request.steps,
        readings=request.readings,
        reset=reset,
    )


def _products(request: Request) -> dict[str, Any]:
    """Time what attention of one layer cannot do without, in XLA: for the prompt, as many
    multiplications as causal attention has, at the speed of the fastest product of square matrices;
    for a token, a softmax between two products, of queries with keys and of weights with values."""
    dims = _layer_of(request)
    heads, kv_heads, head_dim = dims.num_attention_heads, dims.num_key_value_heads, dims.head_dim
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    squares = {side: normal(side, side) for side in SIDES}
    multiply = {side: jax.jit(jnp.matmul).lower(a, a).compile() for side, a in squares.items()}
    q, rows = normal(kv_heads, heads // kv_heads, head_dim), (kv_heads, request.prompt, head_dim)
    k, v = normal(*rows), normal(*rows)

    def two_products(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("kgh,ksh->kgs", q, k), axis=-1)
        return jnp.einsum("kgs,ksh->kgh", weights, v)

    step = jax.jit(two_products).lower(q, k, v).compile()
    if request.warm:
        return {}
    milliseconds_each = min(
        timed(lambda side=side: jax.block_until_ready(multiply[side](*[squares[side]] * 2)))
        / side**3
        for side in SIDES
        for _ in range(10)
    )
    multiplications = heads * head_dim * request.prompt * (request.prompt + 1)

    def token() -> None:
        jax.block_until_ready(step(q, k, v))

    times = request_times(lambda: None, token, request.steps)
    return {**times, "first_ms": round(multiplications * milliseconds_each, 3)}


if __name__ == "__main__":
    measured_by(measure)
