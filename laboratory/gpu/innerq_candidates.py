"""The InnerQ paper's candidates: the two matrix-vector products of decode attention by themselves.

Its shapes are not printed. Its times double from Llama 3.2-1B to 3.1-8B and grow by a quarter to
Llama 2-13B, as query heads times head dim do (32 x 64, 32 x 128, 40 x 128) and KV heads do not: so
each query head has keys and values of its own here too. Batch 1, groups of 32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import Planned, Task, name_of, padded_heads
from benchmarks.gpu.device_timing import first, nudged, uniform
from benchmarks.gpu.random_bodies import Body, checked_part, plan_of
from pallas_kernels.decode_attention import matvec
from pallas_kernels.launch import Launch

PAPER_MODELS = {  # query heads, each with its own keys and values; head dim
    "Llama-3.2-1B": (32, 64),
    "Llama-3.1-8B": (32, 128),
    "Llama-2-13B": (40, 128),
}
EXACT = "bf16"
INNER, OUTER = (
    "innerq:bits=2,mode=asym",
    "kivi:bits=2",
)  # the same codes, scales and zeros; only the axis of the groups differs


def paper_shape(model: str, tokens: int) -> Shape:
    heads, head_dim = PAPER_MODELS[model]
    return Shape(1, tokens, head_dim, heads, 1)


def product_tasks(shape: Shape, launches: Sequence[Launch]) -> list[Planned]:
    """Return the tasks of "scores" (q . K^T), then "values" (p . V): full precision, grouped over
    the inner axis, over the outer axis."""
    parts = (("scores", scores_task), ("values", _values))
    return [
        Planned(part, spec, functools.partial(make, shape, spec, tuple(launches)))
        for part, make in parts
        for spec in (EXACT, INNER, OUTER)
    ]


def _exact_scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bkgh,bksh->bkgs", q.astype(k.dtype), k, preferred_element_type=jnp.float32)


def _exact_values(p: Array, v: Array) -> Array:
    padded = padded_heads(p.astype(v.dtype))
    return jnp.einsum("bkgs,bksh->bkgh", padded, v, preferred_element_type=jnp.float32)[
        :, :, : p.shape[2]
    ]


def scores_task(shape: Shape, spec: str, launches: Sequence[Launch]) -> Task:
    """Make the task of q K^T over the keys of a cache, or over unquantized ones."""
    body = Body(plan_of(_cache(spec), shape).k, shape)

    def kernel(launch: Launch, q: Array, copy: Any) -> Array:
        return matvec.scores(
            q, body.reader, body.arrays(copy), capacity=shape.tokens, launch=launch
        )

    def check(q: Array, copy: Any, out: Array) -> tuple[Array, Array]:
        q, out = checked_part((q, out))
        return out, jnp.einsum(
            "bkgh,bksh->bkgs", q, body.checked_rows(copy).astype(jnp.float32), precision="highest"
        )

    return Task(
        spec == EXACT,
        body.nbytes + 4 * shape.kv_heads * shape.tokens,  # and the scores, in fp32
        body.nbytes,
        4 * shape.kv_heads * shape.tokens,
        start=lambda: uniform((1, shape.kv_heads, 1, shape.head_dim), jnp.uint32(17), -3.0, 3.0),
        copy=body.copy,
        calls=_calls(lambda q, copy: _exact_scores(q, body.rows(copy)), kernel, spec, launches),
        feed=lambda q, out: q + first(out),
        check=check,
    )


def _values(shape: Shape, spec: str, launches: Sequence[Launch]) -> Task:
    body = Body(plan_of(_cache(spec), shape).v, shape)

    def kernel(launch: Launch, p: Array, copy: Any) -> Array:
        return matvec.weighted_values(p, body.reader, body.arrays(copy), launch=launch)

    def check(p: Array, copy: Any, out: Array) -> tuple[Array, Array]:
        p, out = checked_part((p, out))
        rows = body.checked_rows(copy).astype(jnp.float32)
        return out, jnp.einsum("bkgs,bksh->bkgh", p.astype(jnp.float32), rows, precision="highest")

    return Task(
        spec == EXACT,
        body.nbytes + 2 * shape.kv_heads * shape.tokens,  # and the weights, in fp16
        body.nbytes,
        0,
        start=lambda: uniform(
            (1, shape.kv_heads, 1, shape.tokens), jnp.uint32(17), 0.0, 1.0, jnp.float16
        ),
        copy=body.copy,
        calls=_calls(lambda p, copy: _exact_values(p, body.rows(copy)), kernel, spec, launches),
        feed=nudged,
        check=check,
    )


def _cache(spec: str) -> str:
    return "dense" if spec == EXACT else spec


def _calls(
    exact: Callable, kernel: Callable, spec: str, launches: Sequence[Launch]
) -> tuple[tuple[str, Callable], ...]:
    if spec == EXACT:
        return (("", exact),)
    return tuple(
        (name_of(launch), jax.jit(functools.partial(kernel, launch))) for launch in launches
    )
