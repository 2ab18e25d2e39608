"""Time decode attention of one layer whose body lies in pages, against the same codes in rows.

    python -m benchmarks.cpu.paged

A step adds one token to each sequence and attends to all. Its CPU time, of all threads, is the
median of rounds in which each implementation runs once; rounds that quantize a block are left out.
Others' work on the machine changes it less than the time that passes. `error` is the largest
relative error of an output row against XLA's with the same codes in rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks import markdown
from benchmarks.cpu.timing import random_layer, relative_error
from benchmarks.report_file import cores
from benchmarks.turns import cycle, in_turns
from kvq_jax.cache.layer_cache import LayerCache
from kvq_jax.cache.layer_plans import CachePlan
from kvq_jax.cache.paged_cache import PagedCache, PagedPlan, paged_plan
from kvq_tools.processor import processor_name

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128


class Implementation(NamedTuple):
    name: str
    step: Callable[[Any, Array, Array, Array], tuple[Array, Any]]
    cache: Any


def paged(plan: PagedPlan, dense: LayerCache, order: np.ndarray) -> tuple[PagedCache, np.ndarray]:
    """Return the dense cache's contents in pages, and their table. Block i of all blocks, those of
    the first sequence first, goes to page order[i]."""
    layer, batch = plan.plan.layer, len(dense.lengths)
    table = order.reshape(batch, plan.width)

    def cut(spec: Any, rows: Array) -> Array:
        axis = spec.axis("tokens")
        entries = rows.shape[axis] // plan.width
        blocks = rows.reshape(*rows.shape[:axis], plan.width, entries, *rows.shape[axis + 1 :])
        blocks = jnp.moveaxis(blocks, axis, 1)
        blocks = blocks.reshape(len(order), *blocks.shape[2:])
        return jnp.zeros_like(blocks).at[order].set(blocks)

    pages = tuple(
        jax.tree.map(cut, codec.body(1, 1, layer.regions.block), body)
        for codec, body in zip(layer.codecs, dense.state.body, strict=True)
    )
    slots = dataclasses.replace(dense, state=dataclasses.replace(dense.state, body=()))
    return PagedCache(pages, slots), table


def implementations(spec: str, batch: int, tokens: int) -> list[Implementation]:
    """Return the same tokens in rows, read by XLA and as this machine reads them, and in pages."""
    heads = KV_HEADS * GROUP
    dims = kvq.CacheDims(1, heads, KV_HEADS, HEAD_DIM, heads * HEAD_DIM)
    plan = kvq.layer_plan(spec, dims, layer=0, capacity=tokens + 256, dtype="float32")
    pages = paged_plan(plan)
    lengths = jnp.full((batch,), tokens, jnp.int32)
    dense = LayerCache(random_layer(plan.layer, batch), lengths)
    in_order = np.arange(batch * pages.width)
    shuffled = np.random.default_rng(0).permutation(in_order)
    chosen = [
        Implementation("rows, XLA", _through(plan, implementation="xla"), dense),
        Implementation("rows", _through(plan), dense),
    ]
    for name, order in (("pages in order, XLA", in_order), ("pages shuffled, XLA", shuffled)):
        cache, table = paged(pages, dense, order)
        chosen.append(Implementation(name, _through(pages, jnp.asarray(table, jnp.int32)), cache))
    return [one._replace(cache=jax.tree.map(jnp.copy, one.cache)) for one in chosen]


def _through(
    plan: CachePlan | PagedPlan, *table: Array, **options: Any
) -> Callable[[Any, Array, Array, Array], tuple[Array, Any]]:
    """Return a compiled step, which donates the cache."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any, *arrays: Array) -> tuple[Array, Any]:
        return plan.attend(cache, *arrays, prefill=False, **options)

    return lambda cache, *arrays: step(cache, *table, *arrays)


def measured(spec: str, batch: int, tokens: int, rounds: int) -> list[list[str]]:
    """Return the lines of the table: name, CPU milliseconds, their ratio, error."""
    chosen = implementations(spec, batch, tokens)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (batch, 1, heads, HEAD_DIM))
        for i, heads in enumerate((KV_HEADS * GROUP, KV_HEADS, KV_HEADS))
    )
    caches, outs = [one.cache for one in chosen], [q] * len(chosen)

    def step(i: int) -> Any:
        outs[i], caches[i] = chosen[i].step(caches[i], q, k, v)
        return outs[i], caches[i]

    works = [functools.partial(step, i) for i in range(len(chosen))]
    (samples,) = in_turns(works, rounds, [time.process_time])
    plain = ~np.isin(np.arange(rounds), cycle(spec, tokens + 1, rounds).ageing)
    samples = samples[:, plain]
    ratios = np.median(samples / samples[0], axis=1)
    errors = [relative_error(out, outs[0]) for out in outs]
    return [
        [one.name, f"{ms:.1f}", f"{ratio:.2f}", f"{error:.1e}"]
        for one, ms, ratio, error in zip(
            chosen, np.median(samples, axis=1), ratios, errors, strict=True
        )
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.paged",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cache", default="kivi:bits=4", help="a method that pages serve")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--tokens", type=int, default=4096, help="cached tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=31, help="at most 200")
    args = parser.parse_args(argv)
    lines = measured(args.cache, args.batch, args.tokens, min(args.rounds, 200))
    print(
        f"`{args.cache}`, {args.batch} sequences of {args.tokens} tokens, {KV_HEADS} KV heads of"
        f" {HEAD_DIM} channels, {GROUP} query heads for each; {cores()} cores of"
        f" {processor_name()}, JAX {jax.__version__}\n"
    )
    print(markdown.table(("body", "CPU ms a step", "times rows by XLA", "error"), lines))


if __name__ == "__main__":
    main()
