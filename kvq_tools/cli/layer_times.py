"""Time attention of one layer of an 8B model on this machine, through several caches, at lengths at
which a cache matters.

A cache starts zeroed, and its content does not change the time of reading it. Caches take turns,
one step each, so that other load on the machine hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_tools.cli.options.demo import LAYER_CONTEXTS as CONTEXTS
from kvq_tools.cli.options.demo import LAYER_MODEL as MODEL
from kvq_tools.cli.planned import NamedCache
from kvq_tools.cli.tables import print_line, print_table

DIMS = kvq.CacheDims(1, 32, 8, 128, 4096)  # a layer of Llama-3.1-8B
STEPS = 9  # timed, after one that is not timed
MIN_STEPS = 3  # timed on a slow or busy machine, after SECONDS at a context
SECONDS = 2


class _Layer:
    """One layer with a cache for the longest context. `timed()` takes one step and returns its
    milliseconds."""

    def __init__(self, cache: NamedCache, dtype: str) -> None:
        capacity = max(CONTEXTS)
        self._cache = kvq.init_cache(cache.spec, DIMS, 1, capacity, dtype)
        (plan,) = self._cache.plans
        self.reads = dispatch.choose(None, plan, DIMS.num_attention_heads, 1).name
        self.bytes = kvq.size.nbytes(self._cache)
        heads = (DIMS.num_attention_heads, DIMS.num_key_value_heads, DIMS.num_key_value_heads)
        keys = jax.random.split(jax.random.key(0), 3)
        self._rows = tuple(
            jax.random.normal(key, (1, n, 1, DIMS.head_dim), dtype)
            for key, n in zip(keys, heads, strict=True)
        )
        self._program: Callable[..., Any] = (
            jax.jit(_attend, donate_argnames="cache").lower(self._cache, *self._rows).compile()
        )

    def fill(self, context: int) -> None:
        lengths = jnp.full_like(self._cache.lengths, context - STEPS - 1)
        self._cache = dataclasses.replace(self._cache, lengths=lengths)

    def timed(self) -> float:
        started = time.perf_counter()
        out, self._cache = self._program(self._cache, *self._rows)
        jax.block_until_ready(out)
        return 1e3 * (time.perf_counter() - started)


def _attend(
    cache: kvq.cache.Cache, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, kvq.cache.Cache]:
    step = kvq.begin(cache, 1, prefill=False)
    out, step = kvq.append_and_attend(step, q, k, v, q_pre=q, k_pre=k)
    return out, kvq.finish(step)


def possible(caches: Sequence[NamedCache]) -> list[NamedCache]:
    """Return the caches that a layer by itself can have: without calibration, and not rebuilt from
    the layer's input."""
    return [
        cache
        for cache in caches
        if all(
            not (codec.facts.rebuilds or codec.learning.parameters(DIMS.num_key_value_heads))
            for codec in cache.spec.layer(0, DIMS, 1024, "float32").codecs
        )
    ]


def times(caches: Sequence[NamedCache], dtype: str) -> dict[str, Any]:
    """Return the milliseconds of a step through each cache at each context, and the shortest
    context from which on it is faster than the first cache."""
    with ThreadPoolExecutor(2) as pool:
        layers = list(pool.map(lambda cache: _Layer(cache, dtype), caches))
    samples: list[list[list[float]]] = [[] for _ in layers]
    for context in CONTEXTS:
        for layer in layers:
            layer.fill(context)
            layer.timed()
        rounds = _rounds(layers)
        for each, taken in zip(samples, zip(*rounds, strict=True), strict=True):
            each.append(list(taken))
    rows = [
        _row(cache, layer, taken, samples[0])
        for cache, layer, taken in zip(caches, layers, samples, strict=True)
    ]
    return {"model": MODEL, "contexts": list(CONTEXTS), "dtype": dtype, "caches": rows}


def _rounds(layers: Sequence[_Layer]) -> list[list[float]]:
    """Return the milliseconds of each layer, round after round."""
    rounds: list[list[float]] = []
    started = time.perf_counter()
    while len(rounds) < MIN_STEPS or (
        len(rounds) < STEPS and time.perf_counter() - started < SECONDS
    ):
        rounds.append([layer.timed() for layer in layers])
    return rounds


def _row(
    cache: NamedCache, layer: _Layer, taken: list[list[float]], baseline: list[list[float]]
) -> dict[str, Any]:
    pairs = zip(taken, baseline, strict=True)
    return {
        "name": cache.text,
        "cache": str(cache.spec),
        "implementation": layer.reads,
        "cache_bytes": layer.bytes,
        "milliseconds": [statistics.median(each) for each in taken],
        "ratio": [statistics.median(_ratios(mine, theirs)) for mine, theirs in pairs],
        "faster_from": faster_from(taken, baseline),
    }


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def print_times(result: dict[str, Any]) -> None:
    """Print the table, and from which length on each cache is faster than the first one."""
    caches = result["caches"]
    lengths = [f"{context // 1024}K tokens" for context in result["contexts"]]
    rows = [
        {"cache": cache["name"]}
        | dict(zip(lengths, (f"{t:.2f}" for t in cache["milliseconds"]), strict=True))
        | {"read by": cache["implementation"]}
        for cache in caches
    ]
    print_table(
        f"Milliseconds on this machine for one decode step's attention in one layer of"
        f" {result['model']}, {result['dtype']}, one sequence",
        rows,
        texts=("cache", "read by"),
    )
    for cache in caches[1:]:
        start, last = cache["faster_from"], f"{cache['ratio'][-1]:.2f} of its time at {lengths[-1]}"
        when = (
            f"is not faster than {caches[0]['name']} here at these lengths"
            if start is None
            else f"is faster than {caches[0]['name']} here from {start // 1024}K tokens on"
        )
        print_line(f"{cache['name']} {when}: {last}")


def is_faster(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Tell whether three of four rounds were faster, and the median, which is printed: a median of
    ratios may be below 1 by chance."""
    upper_quartile = statistics.quantiles(_ratios(mine, theirs), n=4)[-1]
    return upper_quartile < 1 and statistics.median(mine) < statistics.median(theirs)


def faster_from(
    taken: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]
) -> int | None:
    """Return the shortest context from which on a cache is faster at every context, or None.

    Args:
        taken: milliseconds of each round at each of CONTEXTS.
        baseline: those of the first cache in the same rounds.
    """
    first = len(taken)
    while first and is_faster(taken[first - 1], baseline[first - 1]):
        first -= 1
    return CONTEXTS[first] if first < len(taken) else None
