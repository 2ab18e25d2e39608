"""Whole decode steps of a Llama-3.1-8B-shaped model on a GPU: milliseconds and tokens per second, through each cache, by kernels and XLA.

Weights and cache contents are random and made on the device. A sample is a loop of a few steps in one program, each waiting for the logits
of the one before; caches are updated in place and grow. At each shape all kernels are timed first, then XLA, which may take a hundred times
as long and whose logits theirs are compared with.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks import llama_8b
from benchmarks.cpu.timing import Shape, relative_error
from benchmarks.gpu.device_timing import Timing, sampled_ms, uniform
from benchmarks.gpu.kernels import measure_bandwidth, progress, summary
from benchmarks.gpu.random_bodies import random_body
from benchmarks.gpu.report import GpuReport, KernelRow, is_fatal, one_line
from benchmarks.report_file import arguments
from kvq_jax.attention.dispatch import Implementation
from kvq_jax.layer.plan import LayerState
from kvq_models import Llama, LlamaConfig
from kvq_models.inference import decoding
from kvq_models.llama.model import abstract_llama
from pallas_kernels.launch import Launch
from pallas_kernels.tiles.layout import SPAN

CACHES = ("dense", "innerq:bits=2", "kivi:bits=4", "kivi:bits=2")
IMPLEMENTATIONS = ("jnp", "asm", "xla", "default")
POINTS = ((32768, 16), (4096, 16), (32768, 1), (4096, 1))  # tokens, batch
STEPS, WARM_UPS = 4, 3  # steps of a sample; runs that are not samples
LONG_RUN = 1.0  # seconds of a program's first run past which it is not repeated


def usual_implementations(tokens: int, batch: int) -> tuple[str, ...]:
    """Return XLA and the kernels: in both arithmetics where they show most (one is `decode_step`'s default), elsewhere in assembly."""
    return ("jnp", "asm", "xla") if (tokens, batch) == POINTS[0] else ("asm", "xla")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _uniform(shape: tuple[int, ...], dtype: str, seed: Array, low: Array, high: Array) -> Array:
    return (uniform(shape, seed, 0.0, 1.0) * (high - low) + low).astype(dtype)


def random_llama(config: LlamaConfig) -> Llama:
    """Return a model with random bf16 weights of usual sizes."""

    def weight(seed: int, struct: jax.ShapeDtypeStruct) -> Array:
        low, high = (0.9, 1.1) if len(struct.shape) == 1 else (-0.035, 0.035)
        return _uniform(struct.shape, "bfloat16", jnp.uint32(seed), jnp.float32(low), jnp.float32(high))

    structs, tree = jax.tree.flatten(abstract_llama(config, "bfloat16"))
    return jax.tree.unflatten(tree, [weight(i, struct) for i, struct in enumerate(structs)])


def random_cache(spec: str, config: LlamaConfig, batch: int, tokens: int, capacity: int) -> kvq.Cache:
    """Return a random cache of `tokens` tokens in each batch row."""
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
    """Return the program of `steps` decode steps, which returns (the last logits, the cache)."""

    def run(llama: Llama, cache: kvq.Cache, token: Array) -> tuple[Array, kvq.Cache]:
        def step(_: Array, carry: tuple[Array, kvq.Cache]) -> tuple[Array, kvq.Cache]:
            logits, cache = carry
            return decoding.decode_step(llama, cache, token + (logits[:, 0] * 1e-30).astype(jnp.int32), implementation=implementation)

        return lax.fori_loop(0, steps, step, (jnp.zeros((cache.batch, llama.config.vocab_size), jnp.float32), cache))

    return run


def implementation_of(name: str) -> Implementation:
    """Return the implementation as `decode_step` takes it."""
    launches = {"asm": Launch("asm"), "jnp": Launch("jnp"), "interpreted": Launch(interpret=True)}
    named: dict[str, Implementation] = {**launches, "xla": "xla", "default": None}
    return named[name]


@dataclasses.dataclass
class Program:
    """A compiled loop and the row it is timed for. failure: the reason why there is none."""

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
    """Time a program and return (the row, the logits of the first run)."""
    row, run = program.row, program.run
    if run is None:
        return dataclasses.replace(row, failure=program.failure), None
    try:
        cache = random_cache(row.candidate, llama.config, row.shape.batch, row.shape.tokens, capacity)
        read = kvq.nbytes(llama) - kvq.nbytes(llama.embed) + kvq.nbytes(cache.layers)
        row = dataclasses.replace(row, moved_bytes=read, copies=1, cold=True)
        token = jnp.arange(row.shape.batch, dtype=jnp.int32)
        held = [jax.block_until_ready(cache)]
        del cache

        def step() -> Array:
            stepped, held[0] = run(llama, held[0], token)
            return stepped

        start = time.perf_counter()
        logits = jax.block_until_ready(step())
        seconds = time.perf_counter() - start
        if seconds > LONG_RUN:
            row = dataclasses.replace(row, samples_ms=(round(1e3 * seconds / STEPS, 6),), remark="the first run alone")
        else:
            row = dataclasses.replace(row, samples_ms=sampled_ms(step, STEPS, samples))
        return row, np.asarray(logits)
    except Exception as error:
        return dataclasses.replace(row, failure=one_line(error)), None


def run(
    points: Sequence[tuple[int, int]],
    caches: Sequence[str],
    names: Sequence[str] | None,
    llama: Llama,
    report: GpuReport,
    path: str | os.PathLike[str],
    timing: Timing,
    *,
    seconds: float = float("inf"),
    threads: int = 1,
) -> None:
    """Add a row for each cache and implementation at each point, saved one by one. names: None for the usual ones."""
    start, config = time.monotonic(), llama.config
    for tokens, batch in points:
        if time.monotonic() - start > seconds:
            report.skipped.append(f"batch {batch}, {tokens} tokens")
            continue
        group = config.num_attention_heads // config.num_key_value_heads
        shape = Shape(batch, tokens, config.head_dim, config.num_key_value_heads, group)
        capacity = -(-(tokens + STEPS * (timing.samples + WARM_UPS)) // SPAN) * SPAN  # kernels read whole spans
        chosen = usual_implementations(tokens, batch) if names is None else names
        wanted = [KernelRow("step", llama_8b.NAME, shape, spec, name, spec == "dense") for spec in caches for name in chosen]
        wanted.sort(key=lambda row: row.arithmetic == "xla")  # the slow ones last
        progress(f"batch {batch}, {tokens} tokens: compiling {len(wanted)} programs")
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            programs = list(pool.map(functools.partial(compiled, config=config, capacity=capacity), wanted))
        progress(f"    {time.monotonic() - start:.0f} s in all")
        time_all(programs, llama, capacity, timing.samples, report, path)
    report.write(path)


def time_all(programs: list[Program], llama: Llama, capacity: int, samples: int, report: GpuReport, path: str | os.PathLike[str]) -> None:
    """Add a row for each program, saved at once. Errors are against XLA's logits, and are filled in when those are known."""
    logits: dict[tuple[str, str], np.ndarray] = {}
    first = len(report.rows)
    while programs:
        row, own_logits = timed(programs.pop(0), llama, capacity, samples)
        report.rows.append(row)
        if own_logits is not None:
            logits[row.candidate, row.arithmetic] = own_logits
        if row.arithmetic == "xla" and own_logits is not None:
            report.rows[first:] = [with_error(other, logits) for other in report.rows[first:]]
        report.write(path)
        progress(f"    {summary(report, row)}")
        if is_fatal(row.failure):
            raise SystemExit(f"the GPU failed: {row.failure}")
    errors = [f"{row.name} {row.error:.1e}" for row in report.rows[first:] if row.error is not None]
    progress(f"    errors: {', '.join(errors)}")


def with_error(row: KernelRow, logits: dict[tuple[str, str], np.ndarray]) -> KernelRow:
    """Return the row, with the error of its logits against XLA's where it has any."""
    own, expected = (logits.get((row.candidate, name)) for name in (row.arithmetic, "xla"))
    if row.arithmetic == "xla" or own is None or expected is None:
        return row
    return dataclasses.replace(row, error=relative_error(own, expected))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.decode_step",
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m benchmarks.gpu.decode_step --json benchmarks/results/step_h200.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", required=True, help="where the rows go, after every cache")
    parser.add_argument("--layers", type=int, default=32, metavar="L", help="layers of the model")
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted({n for n, _ in POINTS}), metavar="N", help="cached tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=sorted({b for _, b in POINTS}), metavar="B", help="sequences")
    parser.add_argument("--cache", nargs="+", default=CACHES, metavar="SPEC", help="caches to measure")
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=[],
        help="kernels in jnp or asm, XLA, or decode_step's own choice; asm and xla if not given, and at 32768 tokens x 16 jnp",
    )
    parser.add_argument("--seconds", type=float, default=130, metavar="S", help="begin no further shape after so long")
    parser.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1), metavar="N", help="programs compiled at a time")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        parser.exit(2, f"a model of this size needs a GPU, this process runs on {jax.default_backend()}\n")
    report = GpuReport.here(
        f"Decode steps of a model like {llama_8b.NAME}, {args.layers} layers",
        ("benchmarks.gpu.decode_step", *arguments(argv)),
    )
    timing = Timing(samples=5)
    measure_bandwidth(report, timing)
    points = [(tokens, batch) for batch in sorted(args.batch, reverse=True) for tokens in sorted(args.tokens, reverse=True)]
    llama = random_llama(llama_8b.llama_config(args.layers))
    run(points, args.cache, args.implementation or None, llama, report, args.json, timing, seconds=args.seconds, threads=args.threads)


if __name__ == "__main__":
    main()
