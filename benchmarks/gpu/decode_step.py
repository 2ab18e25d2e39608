"""Time whole decode steps of a model like Llama-3.1-8B on a GPU, through each cache.

Rows are milliseconds and tokens per second, by kernels and by XLA. Weights and cache contents are
random and made on the device. A sample is a loop of a few steps in one program, each waiting for
the logits of the one before. Caches are updated in place and grow. Kernels are timed at all shapes
first, then XLA, which may take a hundred times as long and is the reference for the kernels'
logits. Programs that do not fit the device's memory are left out by name. One program is traced,
and its microseconds by kernel name go into the file too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
from benchmarks.gpu.compiling import THREADS, compiled_first, leave
from benchmarks.gpu.device_timing import SHORT, Timing, memory_limit, sampled_ms
from benchmarks.gpu.kernels import measure_bandwidth, said_wrong, summary
from benchmarks.gpu.random_model import TINY, random_cache, random_llama
from benchmarks.gpu.report import GpuReport, KernelRow, Trace, is_fatal, one_line
from benchmarks.gpu.trace import traced
from benchmarks.points import points_of
from benchmarks.progress import progress
from benchmarks.report_file import arguments
from kvq_jax.attention.dispatch import Implementation
from kvq_models import Llama, LlamaConfig
from kvq_models.inference import decoding
from kvq_models.llama.model import abstract_llama
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route
from pallas_kernels.tiles.layout import SPAN

CACHES = ("dense", "kivi:bits=4", "innerq:bits=2", "kivi:bits=2")
IMPLEMENTATIONS: dict[str, Implementation] = {
    "jnp": Launch("jnp"),
    "asm": Launch("asm"),
    "mosaic": Launch("asm", route="mosaic"),
    "xla": "xla",
    "default": None,
    "interpreted": Launch(interpret=True),
}
POINTS = ((32768, 16), (4096, 16), (32768, 64), (4096, 64), (32768, 1), (4096, 1))  # tokens, batch
TRACED = "kivi:bits=4"  # the cache whose first program is traced
STEPS, WARM_UPS = 4, 4  # steps of a sample, and runs that are not samples (one is traced)
LONG_RUN = 1.0  # seconds of a program's first run past which it is not repeated


def usual_implementations(tokens: int, batch: int) -> tuple[str, ...]:
    """Return the implementations at a point: kernels on Mosaic GPU, if this JAX has it, or else in
    assembly. At the first and the last point both, at the last also XLA."""
    if route.missing():
        return ("asm", "xla") if (tokens, batch) == POINTS[-1] else ("asm",)
    others = {POINTS[0]: ["asm"], POINTS[-1]: ["asm", "xla"]}
    return ("mosaic", *others.get((tokens, batch), []))


def steps_program(
    implementation: Implementation, steps: int
) -> Callable[[Llama, kvq.cache.Cache, Array], tuple[Array, kvq.cache.Cache]]:
    """Return the program of `steps` decode steps, which returns (the last logits, the cache)."""

    def run(llama: Llama, cache: kvq.cache.Cache, token: Array) -> tuple[Array, kvq.cache.Cache]:
        def step(_: Array, carry: tuple[Array, kvq.cache.Cache]) -> tuple[Array, kvq.cache.Cache]:
            logits, cache = carry
            return decoding.decode_step(
                llama,
                cache,
                token + (logits[:, 0] * 1e-30).astype(jnp.int32),
                implementation=implementation,
            )

        return lax.fori_loop(
            0, steps, step, (jnp.zeros((cache.batch, llama.config.vocab_size), jnp.float32), cache)
        )

    return run


@dataclasses.dataclass
class Program:
    """A compiled loop and the row it is timed for. needed: the bytes of its weights, cache and
    temporaries. failure: why there is none."""

    row: KernelRow
    capacity: int
    needed: int = 0
    run: Callable[..., Any] | None = None
    failure: str = ""


def compiled(row: KernelRow, config: LlamaConfig, capacity: int) -> Program:
    batch = row.shape.batch
    arguments = (
        abstract_llama(config, "bfloat16"),
        kvq.cache.layout(row.candidate, config, batch, capacity, "bfloat16"),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    needed = kvq.size.nbytes(arguments[0]) + kvq.size.nbytes(arguments[1].layers)
    if needed > memory_limit():
        return Program(row, capacity, needed)
    try:
        loop = (
            jax.jit(steps_program(IMPLEMENTATIONS[row.arithmetic], STEPS), donate_argnums=1)
            .lower(*arguments)
            .compile()
        )
        memory: Any = loop.memory_analysis()
        return Program(row, capacity, needed + memory.temp_size_in_bytes, loop)
    except Exception as error:
        return Program(row, capacity, failure=one_line(error))


def timed(
    program: Program, llama: Llama, samples: int, tracing: bool
) -> tuple[KernelRow, np.ndarray | None, Trace | None]:
    """Time a program and return (the row, the logits of the first run, its trace if asked for)."""
    row, run = program.row, program.run
    if program.needed > memory_limit():
        said = f"left out: needs {program.needed / 2**30:.1f} GiB of {memory_limit() / 2**30:.1f}"
        return dataclasses.replace(row, remark=said), None, None
    if run is None:
        return dataclasses.replace(row, failure=program.failure), None, None
    try:
        cache = random_cache(
            row.candidate, llama.config, row.shape.batch, row.shape.tokens, program.capacity
        )
        read = kvq.size.nbytes(llama) - kvq.size.nbytes(llama.embed) + kvq.size.nbytes(cache.layers)
        row = dataclasses.replace(row, moved_bytes=read, copies=1, cold=True)
        token = jnp.arange(row.shape.batch, dtype=jnp.int32)
        current_cache = [jax.block_until_ready(cache)]
        del cache

        def step() -> Array:
            stepped, current_cache[0] = run(llama, current_cache[0], token)
            return stepped

        start = time.perf_counter()
        logits = jax.block_until_ready(step())
        seconds = time.perf_counter() - start
        if seconds > LONG_RUN:
            row = dataclasses.replace(
                row, samples_ms=(round(1e3 * seconds / STEPS, 6),), remark="the first run alone"
            )
        else:
            row = dataclasses.replace(row, samples_ms=sampled_ms(step, STEPS, samples))
        trace = Trace(place_of(row), STEPS, traced(step)) if tracing else None
        return row, np.asarray(logits), trace
    except Exception as error:
        return dataclasses.replace(row, failure=one_line(error)), None, None


def place_of(row: KernelRow) -> str:
    return f"{row.name}, batch {row.shape.batch}, {row.shape.tokens} tokens"


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
    """Add a row for each cache and implementation at each point, saved one by one, until the time
    is used up. names: None for the usual ones."""
    start, config = time.monotonic(), llama.config
    group = config.num_attention_heads // config.num_key_value_heads
    wanted = [
        KernelRow(
            "step",
            llama_8b.NAME,
            Shape(batch, tokens, config.head_dim, config.num_key_value_heads, group),
            spec,
            name,
            spec == "dense",
        )
        for tokens, batch in points
        for spec in caches
        for name in (usual_implementations(tokens, batch) if names is None else names)
    ]
    wanted.sort(key=lambda row: row.arithmetic == "xla")  # the slow ones last
    progress(
        f"{len(wanted)} programs of {config.num_hidden_layers} layers, {threads} compiled at a time"
    )

    def compile(row: KernelRow) -> Program:
        longest = row.shape.tokens + STEPS * (timing.samples + WARM_UPS)
        return compiled(row, config, -(-longest // SPAN) * SPAN)  # kernels read whole spans

    logits: dict[tuple[Shape, str, str], np.ndarray] = {}
    left = {row.case: row for row in wanted}
    batches = itertools.groupby(wanted, lambda row: row.arithmetic == "xla")
    for row, program in compiled_first(compile, batches, threads, start + seconds):
        del left[row.case]
        tracing = not report.traces and row.candidate == TRACED and row.arithmetic != "xla"
        report.running[:] = [row]
        report.write(path)
        row, row_logits, trace = timed(program, llama, timing.samples, tracing)
        report.running.clear()
        report.rows.append(row)
        report.traces.extend([trace] if trace else [])
        if row_logits is not None:
            logits[row.shape, row.candidate, row.arithmetic] = row_logits
            report.rows[:] = [with_error(other, logits) for other in report.rows]
        report.write(path)
        progress(
            f"{time.monotonic() - start:5.0f} s  {row.shape.tokens} x {row.shape.batch}:"
            f" {summary(report, report.rows[-1])}"
        )
        if is_fatal(row.failure):
            raise SystemExit(f"the GPU failed: {row.failure}")
    report.skipped.extend(place_of(row) for row in left.values())
    report.write(path)


def with_error(row: KernelRow, logits: dict[tuple[Shape, str, str], np.ndarray]) -> KernelRow:
    """Return the row with the error of its logits against XLA's, if both are known."""
    row_logits, expected = (
        logits.get((row.shape, row.candidate, name)) for name in (row.arithmetic, "xla")
    )
    if (
        row.section != "step"
        or row.arithmetic == "xla"
        or row.error is not None
        or row_logits is None
        or expected is None
    ):
        return row
    return dataclasses.replace(row, error=relative_error(row_logits, expected))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.decode_step",
        description=(__doc__ or "").partition("\n")[0],
        epilog=(
            "example: python -m benchmarks.gpu.decode_step --json benchmarks/results/step_h200.json"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", required=True, help="where the rows go, after every program"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=8,
        metavar="L",
        help="layers of the model; the whole one has 32",
    )
    parser.add_argument(
        "--points",
        nargs="+",
        default=[f"{n}:{b}" for n, b in POINTS],
        metavar="TOKENS:BATCH",
        help="shapes, in order",
    )
    parser.add_argument(
        "--cache", nargs="+", default=CACHES, metavar="SPEC", help="caches to measure"
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=[],
        help=(
            "kernels by Triton in jnp or asm or on Mosaic GPU, XLA, or decode_step's own choice; if"
            " not given mosaic, with asm at 32768:16 and 4096:1 and xla at 4096:1"
        ),
    )
    parser.add_argument(
        "--seconds", type=float, default=130, metavar="S", help="time nothing more after so long"
    )
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="programs compiled at a time"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a tiny model, interpreted kernels, on any device; not a measurement",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        points = points_of(args.points)
        if jax.default_backend() != "gpu" and not args.tiny:
            raise ValueError(
                f"a model of this size needs a GPU, this process runs on {jax.default_backend()};"
                " --tiny runs a small one"
            )
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    config, timing, names = (
        llama_8b.llama_config(args.layers),
        Timing(samples=5),
        args.implementation or None,
    )
    if args.tiny:
        config, timing, names = TINY, SHORT, args.implementation or ("interpreted", "xla")
        points = list(dict.fromkeys((256, min(2, batch)) for _, batch in points))
    report = GpuReport.here(
        f"Decode steps of a model like {llama_8b.NAME}, {config.num_hidden_layers} layers",
        ("benchmarks.gpu.decode_step", *arguments(argv)),
    )
    measure_bandwidth(report, timing)
    run(
        points,
        args.cache,
        names,
        random_llama(config),
        report,
        args.json,
        timing,
        seconds=args.seconds,
        threads=args.threads,
    )
    if report.skipped:
        progress(f"left out for lack of time: {'; '.join(report.skipped)}")
    return said_wrong(report)


if __name__ == "__main__":
    leave(main())
