"""Whole decode steps of a Llama-3.1-8B-shaped model on a GPU: milliseconds and tokens per second, through each cache, by kernels and XLA.

Weights and cache contents are random and made on the device. A sample is a loop of a few steps in one program, each waiting for the logits
of the one before; caches are updated in place and grow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.common import Shape, relative_error
from benchmarks.device_timing import Timing, sampled_ms, uniform
from benchmarks.kernel_candidates import random_body
from benchmarks.kernel_report import KernelReport, KernelRow, is_fatal, one_line
from benchmarks.kernels import measure_bandwidth, progress, summary
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.plan import LayerState
from models import Llama, LlamaConfig, decoding
from models.config import RopeConfig
from models.llama import abstract_llama
from pallas_kernels._launch import Launch

MODEL = "Llama-3.1-8B"
CACHES = ("dense", "innerq:bits=2", "kivi:bits=4", "kivi:bits=2")
IMPLEMENTATIONS = ("asm", "xla", "jnp", "default")
POINTS = ((32768, 16), (4096, 16), (32768, 1), (4096, 1))  # tokens, batch
STEPS, WARM_UPS = 4, 3  # steps of a sample; runs that are not samples


def llama_config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _uniform(shape: tuple[int, ...], dtype: str, seed: Array, low: Array, high: Array) -> Array:
    return (uniform(shape, seed, 0.0, 1.0) * (high - low) + low).astype(dtype)


def random_llama(config: LlamaConfig) -> Llama:
    """bf16 weights of usual sizes."""

    def weight(seed: int, struct: jax.ShapeDtypeStruct) -> Array:
        low, high = (0.9, 1.1) if len(struct.shape) == 1 else (-0.035, 0.035)
        return _uniform(struct.shape, "bfloat16", jnp.uint32(seed), jnp.float32(low), jnp.float32(high))

    structs, tree = jax.tree.flatten(abstract_llama(config, "bfloat16"))
    return jax.tree.unflatten(tree, [weight(i, struct) for i, struct in enumerate(structs)])


def random_cache(spec: str, config: LlamaConfig, batch: int, tokens: int, capacity: int) -> kvq.Cache:
    """A cache of `tokens` tokens in each row."""
    empty = kvq.layout(spec, config, batch, capacity, "bfloat16")

    @functools.cache
    def maker(plan: Any) -> Callable[[Array], LayerState]:
        def make(seed: Array) -> LayerState:
            layout = plan.layout(batch, "bfloat16")
            body = tuple(
                random_body(codec.body(batch, plan.heads, plan.regions.body_capacity), seed * 2 + jnp.uint32(i))
                for i, codec in enumerate(plan.codecs)
            )
            sink, ring = jax.tree.map(lambda s: uniform(s.shape, seed + jnp.uint32(99), -1.0, 1.0, s.dtype), (layout.sink, layout.ring))
            return LayerState(sink, ring, body, plan.init(batch, "bfloat16").stats)

        return jax.jit(make)

    layers = tuple(maker(plan)(jnp.uint32(i)) for i, plan in enumerate(empty.plans))
    return dataclasses.replace(empty, layers=layers, lengths=jnp.full((batch,), tokens, jnp.int32))


def steps_program(implementation: Implementation, steps: int) -> Callable[[Llama, kvq.Cache, Array], tuple[Array, kvq.Cache]]:
    """`steps` decode steps: (the last logits, the cache)."""

    def run(llama: Llama, cache: kvq.Cache, token: Array) -> tuple[Array, kvq.Cache]:
        def step(_: Array, carry: tuple[Array, kvq.Cache]) -> tuple[Array, kvq.Cache]:
            logits, cache = carry
            return decoding.decode_step(llama, cache, token + (logits[:, 0] * 1e-30).astype(jnp.int32), implementation=implementation)

        return lax.fori_loop(0, steps, step, (jnp.zeros((cache.batch, llama.config.vocab_size), jnp.float32), cache))

    return run


def implementation_of(name: str) -> Implementation:
    """What `decode_step` is told for an implementation of the table."""
    launches = {"asm": Launch("asm"), "jnp": Launch("jnp"), "interpreted": Launch(interpret=True)}
    named: dict[str, Implementation] = {**launches, "xla": "xla", "default": None}
    return named[name]


@dataclasses.dataclass
class Program:
    """A compiled loop and what it is of. failure: why there is none."""

    row: KernelRow
    run: Callable[..., Any] | None = None
    failure: str = ""


def compiled(row: KernelRow, config: LlamaConfig, capacity: int) -> Program:
    batch = row.shape.batch
    arguments = (
        abstract_llama(config, "bfloat16"),
        kvq.layout(row.candidate, config, batch, capacity, "bfloat16"),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    try:
        return Program(row, jax.jit(steps_program(implementation_of(row.arithmetic), STEPS), donate_argnums=1).lower(*arguments).compile())
    except Exception as error:
        return Program(row, failure=one_line(error))


def timed(program: Program, llama: Llama, capacity: int, samples: int) -> tuple[KernelRow, np.ndarray | None]:
    """(the row, the logits of the first run)."""
    row, run = program.row, program.run
    if run is None:
        return dataclasses.replace(row, failure=program.failure), None
    try:
        cache = random_cache(row.candidate, llama.config, row.shape.batch, row.shape.tokens, capacity)
        read = kvq.nbytes(llama) - kvq.nbytes(llama.embed) + kvq.nbytes(cache.layers)
        row = dataclasses.replace(row, moved_bytes=read, copies=1, cold=True)
        token = jnp.arange(row.shape.batch, dtype=jnp.int32)
        logits, cache = run(llama, cache, token)
        held = [cache]
        del cache

        def step() -> Array:
            found, held[0] = run(llama, held[0], token)
            return found

        times = sampled_ms(step, STEPS, samples)
        return dataclasses.replace(row, samples_ms=times), np.asarray(logits)
    except Exception as error:
        return dataclasses.replace(row, failure=one_line(error)), None


def run(
    points: Sequence[tuple[int, int]],
    caches: Sequence[str],
    names: Sequence[str],
    llama: Llama,
    report: KernelReport,
    path: str | os.PathLike[str],
    timing: Timing,
    *,
    seconds: float = float("inf"),
    threads: int = 1,
) -> None:
    """A row for each cache and implementation at each point, saved cache by cache."""
    start, config = time.monotonic(), llama.config
    for tokens, batch in points:
        if time.monotonic() - start > seconds:
            report.skipped.append(f"batch {batch}, {tokens} tokens")
            continue
        group = config.num_attention_heads // config.num_key_value_heads
        shape = Shape(batch, tokens, config.head_dim, config.num_key_value_heads, group)
        capacity = tokens + STEPS * (timing.samples + WARM_UPS)
        wanted = [KernelRow("step", MODEL, shape, spec, name, spec == "dense") for spec in caches for name in names]
        progress(f"batch {batch}, {tokens} tokens: compiling {len(wanted)} programs")
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            programs = list(pool.map(functools.partial(compiled, config=config, capacity=capacity), wanted))
        progress(f"    {time.monotonic() - start:.0f} s in all")
        for spec in caches:
            rows = timed_rows([p for p in programs if p.row.candidate == spec], llama, capacity, timing.samples)
            report.rows += rows
            report.write(path)
            for row in rows:
                progress(f"    {summary(report, row)}")
            if fatal := [row.failure for row in rows if is_fatal(row.failure)]:
                raise SystemExit(f"the GPU failed: {fatal[0]}")
    report.write(path)


def timed_rows(programs: Sequence[Program], llama: Llama, capacity: int, samples: int) -> list[KernelRow]:
    """The rows of one cache; errors are against XLA's logits, where those are measured."""
    rows, logits = [], {}
    for program in programs:
        row, logits[program.row.arithmetic] = timed(program, llama, capacity, samples)
        rows.append(row)
    expected = logits.get("xla")
    for i, row in enumerate(rows):
        found = logits[row.arithmetic]
        if row.arithmetic != "xla" and found is not None and expected is not None:
            rows[i] = dataclasses.replace(row, error=relative_error(found, expected))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m benchmarks.step --json benchmarks/results/step_h200.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--json", metavar="FILE", required=True, help="where the rows go, after every cache")
    made.add_argument("--layers", type=int, default=32, metavar="L", help="layers of the model")
    made.add_argument("--tokens", type=int, nargs="+", default=sorted({n for n, _ in POINTS}), metavar="N", help="cached tokens")
    made.add_argument("--batch", type=int, nargs="+", default=sorted({b for _, b in POINTS}), metavar="B", help="sequences")
    made.add_argument("--cache", nargs="+", default=CACHES, metavar="SPEC", help="caches to measure")
    made.add_argument(
        "--implementation",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=IMPLEMENTATIONS[:2],
        help="kernels in asm or jnp, XLA, or decode_step's own choice",
    )
    made.add_argument("--seconds", type=float, default=130, metavar="S", help="begin no further shape after so long")
    made.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="programs that are compiled at a time")
    args = made.parse_args(argv)
    if jax.default_backend() != "gpu":
        made.exit(2, f"a model of this size needs a GPU, this process runs on {jax.default_backend()}\n")
    report = KernelReport.here(
        f"Decode steps of a model like {MODEL}, {args.layers} layers", ("benchmarks.step", *(sys.argv[1:] if argv is None else argv))
    )
    timing = Timing(samples=5)
    measure_bandwidth(report, timing)
    points = [(tokens, batch) for batch in sorted(args.batch, reverse=True) for tokens in sorted(args.tokens, reverse=True)]
    llama = random_llama(llama_config(args.layers))
    run(points, args.cache, args.implementation, llama, report, args.json, timing, seconds=args.seconds, threads=args.threads)


if __name__ == "__main__":
    main()
