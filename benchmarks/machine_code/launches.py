"""Count the launches of a layer of a decode step, compiled for a GPU that need not be here.

    python -m benchmarks.machine_code.launches --json benchmarks/results/launches_jax_0_10.json
    python -m benchmarks.machine_code.launches --case kivi --points 32768:16

The counts are read from XLA's list of thunks. A layer ends with its attention kernel, or with the
last one if heads come in groups. Loops count as often as their bodies run, a branch as its longer
side. Times are estimates: NODE_US for each launch, and the bytes of the cache at the bandwidth that
a copy reaches. Rows in the file from the same commit are kept, so a run that was cut short goes on,
and a run of some cases adds to another's. Needs the extra `aot`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

import kvq_jax as kvq
from benchmarks.llama_8b import NAME, llama_config
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.target import H200, TARGETS, Target
from benchmarks.machine_code.thunks import LAYERS, by_name, captured, of_a_layer, thunks
from benchmarks.machine_code.tools import missing
from benchmarks.markdown import head, table
from benchmarks.points import points_of
from benchmarks.progress import progress
from benchmarks.report_file import Header, Report, arguments, header
from kvq_jax.layer.plan import LayerPlan
from kvq_models import decode_step
from kvq_models.llama.model import abstract_llama
from pallas_kernels.launch import KernelRoute, Launch

SPECS = (
    "dense",
    "kivi:bits=4",
    "kivi:bits=2",
    "innerq:bits=2",
    "kvquant:bits=4",
    "k=polarquant+v=innerq:bits=4",
)
POINTS = ((32768, 1), (32768, 16), (32768, 64), (4096, 16))  # tokens, batch
NODE_US = 2.0  # of a launch inside of a graph


def over_limit(beside: int, limit_us: float) -> float:
    """Return the estimated time of `beside` launches and of bytes that take `limit_us`, over the
    latter."""
    return (beside * NODE_US + limit_us) / limit_us


def limit_us(spec: str, batch: int, tokens: int, target: Target = H200) -> float:
    """Return the microseconds in which the target copies the bytes of a layer's cache."""
    cache = kvq.cache.layout(spec, llama_config(1), batch, tokens, "bfloat16")
    return kvq.size.nbytes(cache.layers[0]) / target.copy_bandwidth * 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The launches of a layer.

    launches: their number by name.
    loops, branches: thunks of these kinds, which some versions of XLA capture in no command buffer.
    limit_us: the bytes of the layer's cache at the target's copy bandwidth.
    graphs: command buffers of the whole step.
    outside: its launches in no command buffer.
    """

    spec: str
    target: str
    jax: str
    batch: int
    tokens: int
    launches: dict[str, int]
    loops: int
    branches: int
    limit_us: float
    graphs: int
    outside: int

    @property
    def case(self) -> tuple[str, int, int, str]:
        return self.spec, self.tokens, self.batch, self.target

    @property
    def beside(self) -> int:
        """Return the launches besides those that multiply matrices."""
        return self.total - self.matrices

    @property
    def over_limit(self) -> float:
        """Return the estimated time of all launches but projections, divided by the time of reading
        the cache."""
        return over_limit(self.beside, self.limit_us)

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    @property
    def matrices(self) -> int:
        """Return the launches that multiply matrices: the five projections, and scores and values
        of windows that XLA reads."""
        return sum(
            count
            for name, count in self.launches.items()
            if re.search("gemm|triton_dot|matmul", name, re.IGNORECASE)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchReport(Report):
    rows: tuple[Row, ...]


def measure(
    spec: str, batch: int, target: Target = H200, tokens: int = 32768, route: KernelRoute = "triton"
) -> Row:
    """Compile a step of LAYERS layers of Llama 3.1 8B and count what its last but one layer
    launches."""
    config = llama_config(LAYERS)
    cache = kvq.cache.layout(spec, config, batch, tokens, "bfloat16")
    launch = Launch("asm", route=route)
    step = jax.jit(functools.partial(decode_step, implementation=launch), donate_argnums=1)
    llama = abstract_llama(config, "bfloat16")
    llama.cache_parameters = nnx.data(tuple(calibrated(plan) for plan in cache.plans))
    program = compile_for(target, step, (llama, cache, jax.ShapeDtypeStruct((batch,), jnp.int32)))
    layer = of_a_layer(by_name(thunks(program.thunks), program.compiled.as_text() or ""))
    counts = Counter(name for thunk in layer for name in thunk.launches(batch))
    graphs, outside = captured(program.captured)
    return Row(
        spec=spec,
        target=target.name,
        jax=jax.__version__,
        batch=batch,
        tokens=tokens,
        launches=dict(sorted(counts.items())),
        loops=sum(thunk.kind == "kWhile" for thunk in layer),
        branches=sum(thunk.kind == "kConditional" for thunk in layer),
        limit_us=limit_us(spec, batch, tokens, target),
        graphs=graphs,
        outside=outside,
    )


def calibrated(plan: LayerPlan) -> tuple[dict[str, jax.ShapeDtypeStruct], ...]:
    """Return the shapes of a layer's calibrated parameters and of what follows from them, keys' and
    values'."""
    specs = (
        codec.learning.carried(plan.heads) | codec.learning.derived(plan.heads)
        for codec in (plan.k, plan.v)
    )
    return tuple(
        {name: described.struct for name, described in of_side.items()} for of_side in specs
    )


HEADER = (
    "cache",
    "JAX",
    "tokens x batch",
    "launches",
    "products",
    "beside",
    "loops",
    "branches",
    "graphs of the step",
    "launches in none",
    "us of launches beside",
    "us of the cache's bytes",
    "both over the bytes",
)


def line(row: Row) -> tuple[str, ...]:
    counts = map(
        str, (row.total, row.matrices, row.beside, row.loops, row.branches, row.graphs, row.outside)
    )
    times = f"{row.beside * NODE_US:.0f}", f"{row.limit_us:.1f}", f"{row.over_limit:.2f}"
    return f"`{row.spec}`", row.jax, f"{row.tokens // 1024}K x {row.batch}", *counts, *times


def page(report: LaunchReport, file: pathlib.Path) -> str:
    """Render the table, and what the launches are."""
    targets = ", ".join(sorted({row.target for row in report.rows}))
    said = (
        f"A layer of a decode step of {NAME} in bfloat16, compiled for {targets} without a GPU."
        f" Times are estimates: {NODE_US:g} us for a launch, and the cache's bytes at the bandwidth"
        " of a copy; nothing was run. Products are the projections of the layer, and scores and"
        " values of windows that XLA reads; their weights' bytes are not in the table. A branch"
        " counts as its longer side; where there is more than one graph, it is in none, and the"
        " host waits for its condition."
    )
    names = [
        f"`{row.spec}`, {row.tokens // 1024}K x {row.batch}, JAX {row.jax}: "
        + ", ".join(_counted(row.launches))
        for row in report.rows
    ]
    rows = table(HEADER, map(line, report.rows))
    return "\n\n".join([*head(report, file, said), rows, "## What they are", *names])


def _counted(launches: dict[str, int]) -> Iterator[str]:
    return (f"{count} {name}" if count > 1 else name for name, count in launches.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code.launches",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts here, after every one")
    parser.add_argument(
        "--case", metavar="REGEX", default="", help="only caches whose spec has a match of this"
    )
    usual = [f"{tokens}:{batch}" for tokens, batch in POINTS]
    parser.add_argument(
        "--points",
        nargs="+",
        default=usual,
        metavar="TOKENS:BATCH",
        help=f"default: {' '.join(usual)}",
    )
    parser.add_argument("--target", choices=TARGETS, default=H200.name, help="the GPU")
    options = parser.parse_args(argv)
    try:
        points = points_of(options.points)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    specs = [spec for spec in SPECS if re.search(options.case, spec)]
    if not specs:
        parser.exit(2, f"no cache matches {options.case!r}: {', '.join(SPECS)}\n")
    if lacking := missing():
        parser.exit(2, f"{lacking}\n")
    described = header(("benchmarks.machine_code.launches", *arguments(argv)))
    rows = {row.case: row for row in earlier_rows(options.json, described)}
    asked = [(spec, tokens, batch, options.target) for spec in specs for tokens, batch in points]
    for case in asked:
        start, (spec, tokens, batch, target) = time.perf_counter(), case
        if case not in rows:
            rows[case] = measure(spec, batch, TARGETS[target], tokens)
        progress(
            f"{spec}, {tokens} x {batch}: {rows[case].total} launches,"
            f" {time.perf_counter() - start:.0f} s"
        )
        if options.json:
            ordered = sorted(
                rows.values(), key=lambda row: (SPECS.index(row.spec), row.batch, -row.tokens)
            )
            LaunchReport(title="Launches of a layer", **described, rows=tuple(ordered)).write(
                options.json
            )
    print(table(HEADER, (line(rows[case]) for case in asked)))


def earlier_rows(path: str | None, described: Header) -> tuple[Row, ...]:
    """Return the rows of a file that holds counts of the same sources and version of JAX, from a
    run that was cut short."""
    if path is None or not pathlib.Path(path).exists():
        return ()
    try:
        earlier = LaunchReport.read(path)
    except TypeError:  # of another form, and so of other sources
        return ()
    same = all(getattr(earlier, name) == described[name] for name in ("commit", "jax_version"))
    return earlier.rows if same and not earlier.commit.endswith("+") else ()


if __name__ == "__main__":
    main()
