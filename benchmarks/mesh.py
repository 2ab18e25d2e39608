"""Decode steps of a small random Llama on eight virtual devices of this CPU, against one, and what
their collectives cost.

Virtual devices share this machine's cores, so nothing gets faster: what the rows show is how much
the splitting itself adds. The collectives of a step are counted in its compiled program, and timed
apart: as many fp32 sums over the mesh, of the same sizes, one after the other. One device and all
meshes take steps in turns, over whole blocks of the cache (benchmarks/turns.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import kvq_jax as kvq
from benchmarks.cpu.decode_step import random_cache, random_llama, small_config
from benchmarks.cpu.timing import WARM, Shape, relative_error
from benchmarks.markdown import head, table
from benchmarks.report_file import Report, arguments, cores, header
from benchmarks.turns import Cycle, check_rounds, cycle, in_turns
from kvq_jax.placement.allowed import parse
from kvq_models import Llama, decode_step, shard_llama

DEVICES = 8
MESHES = ("rows=4", "heads=4", "tokens=8", "heads=4,tokens=2", "rows=2,heads=4")
BATCH, LAYERS, HEAD_DIM, GROUP = 4, 4, 64, 4


@dataclasses.dataclass(frozen=True)
class Row:
    """A step through one cache on one mesh ("" for a single device). Times are in ms.

    step_ms, ratio: by `Cycle.step` and `Cycle.ratio`; ratio is to one device, 0.0 in older files.
    error: error of the logits, relative to a single device's.
    collectives: collectives of a step. Bytes count the results on each device, all as fp32.
    """

    cache: str
    mesh: str
    tokens: int
    step_ms: float
    samples_ms: tuple[float, ...]
    collectives: int
    collective_bytes: int
    collectives_ms: float
    error: float
    ratio: float = 0.0

    @property
    def cycle(self) -> Cycle:
        """Return which samples quantized a block."""
        return cycle(self.cache, self.tokens + WARM, len(self.samples_ms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshReport(Report):
    """Steps on virtual devices. cores: of the machine that they share."""

    batch: int
    cores: int
    rows: tuple[Row, ...]


def collective_sizes(program: jax.stages.Compiled) -> list[int]:
    """Return how many numbers each collective of a compiled step gives."""
    sizes = []
    for line in (program.as_text() or "").splitlines():
        match = re.search(
            r"= (.*?)"
            r" (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
            line,
        )
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes.append(sum(math.prod(int(d) for d in shape.split(",") if d) for shape in shapes))
    return sizes


def collectives_ms(placement: kvq.Placement, sizes: Sequence[int], rounds: int) -> float:
    """Return the median time of sums of `sizes` floats over all devices, each of which waits for
    the one before."""
    if not sizes:
        return 0.0
    axes = placement.mesh.axis_names

    def sums(start: jax.Array) -> jax.Array:
        for size in sizes:
            start = jax.lax.psum(jnp.broadcast_to(start, (size,)), axes)[0] / DEVICES
        return start

    run = jax.jit(
        jax.shard_map(
            sums,
            mesh=placement.mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    start = jax.device_put(jnp.ones(()), placement.everywhere)
    return float(np.median(in_turns([lambda: run(start)], rounds)))


def step_on(
    plain: Llama, spec: str, shape: Shape, mesh: str, steps: int
) -> tuple[Callable[[], jax.Array], list[int]]:
    """Return a decode step on a mesh ("" for one device), and the sizes of its collectives."""
    placement = parse(mesh) if mesh else None
    token = jnp.arange(BATCH, dtype=jnp.int32)
    filled = random_cache(plain, spec, shape, shape.tokens + steps)
    current_cache = [filled if placement is None else kvq.rows.move(filled, placement)]
    llama = plain if placement is None else shard_llama(plain, placement)
    program = jax.jit(decode_step, donate_argnames="cache").lower(llama, current_cache[0], token)
    step = program.compile()

    def one() -> jax.Array:
        logits, current_cache[0] = step(llama, current_cache[0], token)
        return logits

    return one, collective_sizes(step)


def measured(spec: str, tokens: int, meshes: Sequence[str], rounds: int) -> list[Row]:
    """Return a row for one device and one for each mesh that the cache's method can have."""
    plain = random_llama(small_config(LAYERS, HEAD_DIM, GROUP))
    shape = Shape(BATCH, tokens, HEAD_DIM, plain.config.num_key_value_heads, GROUP)
    every = ("", *meshes)
    steps, sizes = zip(*(step_on(plain, spec, shape, m, rounds + WARM) for m in every), strict=True)
    logits = [np.asarray(step()) for step in steps]
    (samples,) = in_turns(steps, rounds)
    of_cycle = cycle(spec, tokens + WARM, rounds)
    rows = []
    for i, mesh in enumerate(every):
        apart = collectives_ms(parse(mesh), sizes[i], rounds) if mesh else 0.0
        row = Row(
            spec,
            mesh,
            tokens,
            of_cycle.step(samples[i]),
            tuple(samples[i].tolist()),
            len(sizes[i]),
            4 * sum(sizes[i]),
            apart,
            relative_error(logits[i], logits[0]),
            of_cycle.ratio(samples[i], samples[0]),
        )
        rows.append(row)
        print(
            f"{spec:14} {mesh or 'one device':18} {tokens:6} tokens {row.step_ms:8.2f} ms a step,"
            f" {row.collectives:3} collectives of {row.collective_bytes:7} bytes {apart:7.2f} ms,"
            f" error {row.error:.1e}",
            flush=True,
        )
    return rows


TIMES = """\
One device and the meshes take steps in turns, and a ratio is of times in the same round. Each is
the median p of the steps, or (1 - 1/block) p + q/block if the cache quantizes a block of tokens in
one step of `block`, which takes q: what a step takes on average."""


def page(report: MeshReport, file: pathlib.Path) -> str:
    """Render a table for each number of tokens."""
    said = (
        f"{LAYERS} layers, {report.batch} rows, {DEVICES} virtual devices that share {report.cores}"
        " cores: a step is not meant to get faster here. The collectives of a step were counted in"
        " its compiled program and timed apart, one after the other."
    )
    parts = [*head(report, file, said), *_of_times(report)]
    names = (
        "cache",
        "mesh",
        "ms",
        "to one device",
        "collectives",
        "their bytes",
        "their ms, apart",
        "error",
    )
    for tokens in dict.fromkeys(row.tokens for row in report.rows):
        rows = [row for row in report.rows if row.tokens == tokens]
        one = {row.cache: row.step_ms for row in rows if not row.mesh}
        parts.append(f"## {tokens:,} tokens")
        lines = (_line(row, row.ratio or row.step_ms / one[row.cache]) for row in rows)
        parts.append(table(names, lines))
    return "\n\n".join(parts)


def _of_times(report: MeshReport) -> list[str]:
    """Return how times are formed, and what an older run left out."""
    if all(row.ratio for row in report.rows):
        return [TIMES]
    parts = ["Times are medians of steps. One device and each mesh were **not timed in turns**."]
    if any(row.cycle.left_out for row in report.rows):
        parts.append("**No timed step quantizes a block** of a packed cache.")
    return [" ".join(parts)]


def _line(row: Row, ratio: float) -> tuple[str, ...]:
    of_step = (
        f"`{row.cache}`",
        f"`{row.mesh}`" if row.mesh else "one device",
        f"{row.step_ms:.2f}",
        f"{ratio:.2f}",
    )
    return (
        *of_step,
        str(row.collectives),
        f"{row.collective_bytes:,}",
        f"{row.collectives_ms:.2f}",
        f"{row.error:.1e}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mesh", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--cache",
        action="append",
        metavar="SPEC",
        help="may be repeated (default: dense, kivi:bits=4, innerq:bits=2)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1024, 16384],
        metavar="N",
        help="held by the caches",
    )
    parser.add_argument(
        "--rounds", type=int, default=32, metavar="R", help="timed steps (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two meshes, 256 tokens: to see that it runs"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args(argv)
    with contextlib.suppress(
        RuntimeError
    ):  # JAX has started already: then it has as many devices as it has
        jax.config.update("jax_num_cpu_devices", DEVICES)
    if len(jax.devices()) < DEVICES:
        parser.error(
            f"JAX has started with {len(jax.devices())} devices; run it as a process of its own, on"
            " the CPU"
        )
    caches = args.cache or (
        ["kivi:bits=4"] if args.quick else ["dense", "kivi:bits=4", "innerq:bits=2"]
    )
    lengths, meshes = ([256], MESHES[2:4]) if args.quick else (args.tokens, MESHES)
    try:
        check_rounds(caches, [tokens + WARM for tokens in lengths], args.rounds)
    except ValueError as error:
        parser.error(str(error))
    command, rows = header(("benchmarks.mesh", *arguments(argv))), ()
    title = f"Decode steps of a Llama with {LAYERS} layers on {DEVICES} virtual devices"
    for spec, tokens in itertools.product(caches, lengths):
        rows += tuple(measured(spec, tokens, meshes, args.rounds))
        report = MeshReport(title=title, **command, batch=BATCH, cores=cores(), rows=rows)
        if args.json:
            report.write(args.json)


if __name__ == "__main__":
    main()
