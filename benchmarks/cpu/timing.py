"""The parts that the CPU benchmarks share: shapes, the row of a result, caches with random
contents, and alternatives timed in turns (benchmarks/turns.py). Every sample is kept in the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvq_jax as kvq
from benchmarks.progress import progress
from benchmarks.report_file import Report, cores, header
from benchmarks.turns import Cycle, cycle, in_turns
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.cache.cache import CacheDims
from kvq_jax.layer.plan import LayerPlan, LayerState
from kvq_jax.types.array_types import Tree
from kvq_tools.processor import processor_name

ATTENTION, DECODE_STEP = "benchmarks.cpu.attention", "benchmarks.cpu.decode_step"
WARM = 2  # steps before the first sample: one to compare logits, one to warm up
CACHES = (
    "dense",
    "kivi:bits=4",
    "kivi:bits=2",
    "innerq:bits=4",
    "innerq:bits=2",
    "innerq:bits=2,mode=sym",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One point of a benchmark: B sequences of `tokens` cached tokens, K KV heads of H channels, G
    query heads for each."""

    batch: int
    tokens: int
    head_dim: int
    kv_heads: int
    group: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation at one shape.

    ratio: `CpuReport.ratio`, as the run that wrote it formed it.
    error: largest relative error of an output row against the reference on the same codes.
    Bytes: of the cache, and what the compiled step needs besides its arguments (temp) and in all
        (peak), as XLA reports them.
    """

    implementation: str
    shape: Shape
    dtype: str
    samples_ms: tuple[float, ...]
    ratio: float
    error: float
    cache_bytes: int
    temp_bytes: int
    peak_bytes: int

    @property
    def best_ms(self) -> float:
        return min(self.samples_ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuReport(Report):
    """Rows, and the conditions they were measured under.

    load: the machine's load average of one minute when a shape was begun, and at the end.
    read_bandwidth: bytes a second at which XLA sums an array that no cache holds, the best of
        several, or 0 if it was not measured.
    lengthened: tokens that the caches held at the first sample beyond those of the shape, if each
        sample is a step that adds one token; None if caches do not grow.
    """

    baseline: str
    cpu: str
    cores: int
    load: tuple[float, ...]
    rows: tuple[Row, ...]
    read_bandwidth: float = 0.0
    lengthened: int | None = None

    @property
    def grows(self) -> bool:
        """Return True if each sample is a decode step that lengthens the caches."""
        return self.lengthened is not None

    def cycle(self, row: Row) -> Cycle:
        """Return which samples of a row quantize a block."""
        if self.lengthened is None:
            return Cycle()
        length = row.shape.tokens + self.lengthened
        return cycle(row.implementation, length, len(row.samples_ms))

    def step_ms(self, row: Row) -> float:
        """Return the milliseconds of a step, by `Cycle.step`."""
        return self.cycle(row).step(row.samples_ms)

    def ratio(self, row: Row) -> float:
        """Return a row's time over that of the baseline of its shape, in pairs of one round."""
        base = next(
            r for r in self.rows if (r.implementation, r.shape) == (self.baseline, row.shape)
        )
        return self.cycle(row).ratio(row.samples_ms, base.samples_ms)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Older ones do not say that their caches grow: those of decode steps do, and
        had taken a step for their logits and one to warm up."""
        report = super().read(path)
        older = report.lengthened is None and DECODE_STEP in report.command
        return dataclasses.replace(report, lengthened=WARM) if older else report


@dataclasses.dataclass
class Candidate:
    """Something to time: `step` runs it `times` times and waits. The first candidate of a list is
    the baseline."""

    implementation: str
    dtype: str
    step: Callable[[], object]
    error: float
    cache_bytes: int
    memory: Any  # jax's CompiledMemoryStats
    times: int = 1


def run(
    title: str,
    command: Sequence[str],
    shapes: Sequence[Shape],
    candidates: Callable[[Shape], list[Candidate]],
    rounds: int,
    file: str | None,
    lengthened: int | None = None,
) -> None:
    """Time the candidates of every shape, print the progress, and write the file after each."""
    rows, load, bandwidth = (), [], read_bandwidth()
    for i, shape in enumerate(shapes):
        load.append(round(os.getloadavg()[0], 2))
        progress(
            f"[{i + 1}/{len(shapes)}] batch {shape.batch}, head_dim {shape.head_dim},"
            f" {shape.tokens} tokens: compiling"
        )
        chosen = candidates(shape)
        progress(f"[{i + 1}/{len(shapes)}] timing {len(chosen)} implementations, {rounds} rounds")
        (times,) = in_turns([c.step for c in chosen], rounds)
        measured = [_row(c, shape, of_one) for c, of_one in zip(chosen, times, strict=True)]
        del chosen  # its arrays, before the next shape's are made
        rows += tuple(measured)
        report = CpuReport(
            title=f"{title}, on one core" if cores() == 1 else title,
            **header(command),
            baseline=rows[0].implementation,
            cpu=processor_name(),
            cores=cores(),
            load=(*load, round(os.getloadavg()[0], 2)),
            rows=rows,
            read_bandwidth=bandwidth,
            lengthened=lengthened,
        )
        rows = tuple(dataclasses.replace(r, ratio=round(report.ratio(r), 4)) for r in rows)
        for row in rows[-len(measured) :]:
            progress(
                f"    {row.implementation:40s} {report.step_ms(row):9.2f} ms {row.ratio:6.2f}x"
            )
        if file:
            dataclasses.replace(report, rows=rows).write(file)


def _row(candidate: Candidate, shape: Shape, times: np.ndarray) -> Row:
    """Return the row of a candidate, its ratio still to be formed."""
    return Row(
        candidate.implementation,
        shape,
        candidate.dtype,
        tuple((times / candidate.times).round(4).tolist()),
        0.0,
        candidate.error,
        candidate.cache_bytes,
        candidate.memory.temp_size_in_bytes,
        _peak(candidate.memory),
    )


def read_bandwidth(size: int = 1 << 28, rounds: int = 15) -> float:
    """Return the bytes a second at which all cores together read memory."""
    parts = jnp.ones((size >> 14, 1 << 12), jnp.float32)  # whole rows for each thread
    total = jax.jit(lambda a: jnp.sum(a, axis=1)).lower(parts).compile()
    jax.block_until_ready(total(parts))

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(total(parts))
        return time.perf_counter() - start

    return round(size / min(once() for _ in range(rounds)), -7)


def _peak(memory: Any) -> int:
    """Return the bytes of arguments, of results that do not share their memory, and temporaries."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def random_layer(plan: LayerPlan, batch: int, seed: int = 0) -> LayerState:
    """Fill a float32 layer with random codes, scales and rows: the contents of a cache do not
    change its speed, and this needs no prompt."""
    rng = np.random.default_rng(seed)

    def floats(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(0.5 * rng.standard_normal(shape, np.float32), dtype)

    def values(spec: BodySpec, struct: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(jnp.dtype(spec.dtype), jnp.integer):
            info = jnp.iinfo(spec.dtype)
            return jnp.asarray(
                rng.integers(info.min, info.max, struct.shape, spec.dtype, endpoint=True)
            )
        return spec.store(floats(struct.shape, spec.dtype))

    layout = plan.layout(batch, "float32")
    body = tuple(
        jax.tree.map(values, codec.body(1, 1, plan.regions.block), side)
        for codec, side in zip(plan.codecs, layout.body, strict=True)
    )
    windows = jax.tree.map(
        lambda struct: floats(struct.shape, struct.dtype), (layout.sink, layout.ring)
    )
    sink, ring = windows
    return dataclasses.replace(plan.init(batch, "float32"), sink=sink, ring=ring, body=body)


def random_parameters(plan: LayerPlan) -> Tree:
    """Return what methods are calibrated for, from random rows, or () if no side needs any."""
    rows = np.random.default_rng(6).standard_normal((2, 512, plan.heads, plan.head_dim), np.float32)
    sides = [
        codec.learning.carry(jax.tree.map(jnp.asarray, codec.learning.calibrate(*rows)))
        if codec.learning.parameters(plan.heads)
        else ()
        for codec in plan.codecs
    ]
    return tuple(sides) if any(sides) else ()


def relative_error(actual: jax.Array | np.ndarray, expected: jax.Array | np.ndarray) -> float:
    """Return the largest relative error of a row (the last axis), by the 2-norm."""
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))


def argument_parser(
    module: str, description: str, *, tokens: tuple[int, ...], batch: tuple[int, ...], rounds: int
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all CPU benchmarks take."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.cpu.{module}",
        description=description,
        epilog=(
            f"example: python -m benchmarks.cpu.{module} --tokens 16384 --cache kivi:bits=4 innerq"
            " --json benchmarks/results/mine.json"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help=(
            "write the raw samples here; `python -m benchmarks.results_page` turns such files into"
            " tables"
        ),
    )
    parser.add_argument(
        "--cache",
        metavar="SPEC",
        nargs="+",
        default=CACHES,
        help="caches to measure; `kvq methods` lists them",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=tokens,
        metavar="N",
        help="cached tokens of each sequence",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=batch, metavar="B", help="sequences"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        metavar="R",
        help="times that each implementation runs; they take turns",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="256 tokens, 1 sequence, few rounds: seconds, to see that it works; no measurement",
    )
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments, and apply --quick."""
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.batch, args.rounds = (256,), (1,), 3
    return args


def add_heads(parser: argparse.ArgumentParser, head_dims: tuple[int, ...]) -> None:
    """Add the options of `shapes_of` that say which heads a layer has."""
    add = parser.add_argument
    add(
        "--head-dim", type=int, nargs="+", default=head_dims, metavar="H", help="channels of a head"
    )
    add("--kv-heads", type=int, default=8, metavar="K", help="KV heads")
    parser.add_argument(
        "--group", type=int, default=4, metavar="G", help="query heads for each KV head"
    )


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes that a command asks for."""
    return [
        Shape(b, n, h, args.kv_heads, args.group)
        for h in args.head_dim
        for b in args.batch
        for n in args.tokens
    ]


def layer_plan(shape: Shape, spec: str) -> LayerPlan:
    """Return the plan of a layer with room for the shape's tokens and one more block."""
    heads = shape.kv_heads * shape.group
    dims = CacheDims(1, heads, shape.kv_heads, shape.head_dim, heads * shape.head_dim)
    cache = kvq.parse(spec)
    return cache.layer(0, dims, shape.tokens + cache.block, "float32")


def first_row(tree: Any) -> Any:
    """Return the first sequence of a batch."""
    return jax.tree.map(lambda a: lax.slice_in_dim(a, 0, 1), tree)
