"""Compare many small decode steps through the kernels with XLA.

Windows fill, blocks leave them, rows rest and fill up, all in one batch. Each step's logits are
compared with XLA's for the same tokens. At the end so is the first layer's cache. Two programs
round its rows alike but for last bits, so codes may differ if an element lies midway between two
levels. If rounding does not explain an error, the run ends with exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.cpu.timing import Shape
from benchmarks.gpu.compiling import THREADS, as_compiled, leave
from benchmarks.gpu.decode_step import IMPLEMENTATIONS
from benchmarks.gpu.kernels import said_wrong
from benchmarks.gpu.random_model import random_cache, random_llama
from benchmarks.gpu.report import GpuReport, KernelRow, one_line
from benchmarks.progress import progress
from benchmarks.report_file import arguments
from kvq_jax.arrays.stored import load_body
from kvq_models import LlamaConfig
from kvq_models.inference import decoding
from pallas_kernels.mosaic import route

CACHES = ("kivi:bits=4", "innerq:bits=2", "kivi:bits=2", "k=polarquant+v=innerq:bits=4")
STARTS = (
    0,
    127,
    95,
    260,
)  # tokens of each row before the first step: none, and before, at and behind a block's end
RESTING = 2  # this row takes no token in every third step
# what rounding may change: the share of words of codes, and the relative error of floats. A wrong
# block is a tenth.
OTHER_STORED = 1e-2
MODEL = "a small Llama"


def config(head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )


def steps_program(
    llama: Any, cache: kvq.cache.Cache, tokens: Array, active: Array, *, implementation: Any
) -> tuple[Array, kvq.cache.Cache]:
    """Return (logits [N, B, V] of each step, the cache after them) for tokens and active [N, B]."""

    def step(cache: kvq.cache.Cache, now: tuple[Array, Array]) -> tuple[kvq.cache.Cache, Array]:
        logits, cache = decoding.decode_step(
            llama, cache, now[0], now[1], implementation=implementation
        )
        return cache, logits

    cache, logits = lax.scan(step, cache, (tokens, active))
    return logits, cache


@dataclasses.dataclass(frozen=True)
class Run:
    """The logits [N, B, V] of each step with 0 if a row took no token, and the first layer's arrays
    after them."""

    logits: np.ndarray
    stored: list[np.ndarray]


def histories(steps: int, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens before the first step [B], tokens [N, B], which rows take one [N, B]). The
    last row is full before the end."""
    starts = np.array([*STARTS, capacity - steps + 3], np.int32)
    tokens = np.random.default_rng(0).integers(0, 256, (steps, len(starts)), np.int32)
    active = np.ones(tokens.shape, bool)
    active[::3, RESTING] = False
    return starts, tokens, active


def filled(spec: str, config: LlamaConfig, starts: np.ndarray, capacity: int) -> kvq.cache.Cache:
    """Return a cache of random contents whose rows have these lengths: a prompt would take longer
    to compile than the steps."""
    return dataclasses.replace(
        random_cache(spec, config, len(starts), 0, capacity), lengths=jnp.asarray(starts)
    )


def stored_of(cache: kvq.cache.Cache) -> list[np.ndarray]:
    """Return the first layer's windows and bodies, floats in fp32."""
    plan, state = cache.plans[0], cache.layers[0]
    bodies = [
        load_body(codec.body(1, 1, plan.regions.block), body)
        for codec, body in zip(plan.codecs, state.body, strict=True)
    ]
    arrays = jax.tree.leaves((state.sink, state.ring, bodies))
    return [
        np.asarray(a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a)
        for a in arrays
    ]


def compared(kernel_run: Run, wanted: Run) -> tuple[float, str]:
    """Return (the largest relative error of a step's logits, what is wrong with the cache or "").

    The error is NaN if one side has NaN and the other has not.
    """
    if not np.array_equal(np.isnan(kernel_run.logits), np.isnan(wanted.logits)):
        return float("nan"), ""
    one, other = (np.nan_to_num(run.logits.astype(np.float64)) for run in (kernel_run, wanted))
    size = np.linalg.norm(other, axis=-1)
    error = float(np.max(np.linalg.norm(one - other, axis=-1)[size > 0] / size[size > 0]))
    for i, (mine, theirs) in enumerate(zip(kernel_run.stored, wanted.stored, strict=True)):
        if np.issubdtype(mine.dtype, np.floating):
            share = float(np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-30))
        else:
            share = np.count_nonzero(mine != theirs) / max(mine.size, 1)
        if not share <= OTHER_STORED:
            return (
                error,
                f"array {i} of the cache, {mine.dtype}{mine.shape}: {share:.1e} of it differs",
            )
    return error, ""


def run(
    specs: Sequence[str],
    names: Sequence[str],
    head_dim: int,
    steps: int,
    report: GpuReport,
    path: str,
    threads: int,
    seconds: float,
) -> None:
    """Add a row for each cache and implementation but XLA, which is run for each cache first."""
    until, capacity = time.monotonic() + seconds, 448
    starts, tokens, active = histories(steps, capacity)
    llama = random_llama(config(head_dim))
    shape = Shape(len(starts), capacity, head_dim, 2, 4)
    caches = {spec: filled(spec, llama.config, starts, capacity) for spec in specs}
    programs = [(spec, name) for spec in specs for name in ("xla", *names)]

    def compiled(program: tuple[str, str]) -> Any:
        spec, name = program
        function = functools.partial(steps_program, implementation=IMPLEMENTATIONS[name])
        try:
            return (
                jax.jit(function)
                .lower(llama, caches[spec], jnp.asarray(tokens), jnp.asarray(active))
                .compile()
            )
        except Exception as error:
            return one_line(error)

    runs: dict[tuple[str, str], Run | str] = {}
    progress(
        f"{len(programs)} programs of {steps} steps, head dim {head_dim}, {threads} compiled at a"
        " time"
    )
    for (spec, name), program in as_compiled(compiled, programs, threads, until):
        runs[spec, name] = _ran(program, llama, caches[spec], tokens, active)
        for other in names:
            if {(spec, other), (spec, "xla")} <= runs.keys() and not any(
                row.case[3:] == (spec, other) for row in report.rows
            ):
                report.rows.append(_row(shape, spec, other, runs[spec, other], runs[spec, "xla"]))
                report.write(path)
                row = report.rows[-1]
                progress(
                    f"    {row.name:50s} {'' if row.error is None else f'{row.error:.1e}'}"
                    f" {row.wrong}"
                )
    compared_rows = {row.case[3:] for row in report.rows}
    report.skipped.extend(
        f"{spec} ({name})" for spec in specs for name in names if (spec, name) not in compared_rows
    )
    report.write(path)


def _ran(
    program: Any, llama: Any, cache: kvq.cache.Cache, tokens: np.ndarray, active: np.ndarray
) -> Run | str:
    if isinstance(program, str):
        return program
    try:
        logits, after = program(llama, cache, jnp.asarray(tokens), jnp.asarray(active))
        return Run(np.where(active[..., None], np.asarray(logits), 0), stored_of(after))
    except Exception as error:
        return one_line(error)


def _row(shape: Shape, spec: str, name: str, kernel_run: Run | str, wanted: Run | str) -> KernelRow:
    row = KernelRow("parity", MODEL, shape, spec, name)
    for run in (kernel_run, wanted):
        if isinstance(run, str):
            return dataclasses.replace(row, failure=run)
    assert isinstance(kernel_run, Run)
    assert isinstance(wanted, Run)
    error, wrong = compared(kernel_run, wanted)
    return dataclasses.replace(row, error=error, failure=wrong)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step_parity",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", required=True, help="where the rows go, after every comparison"
    )
    parser.add_argument(
        "--cache", nargs="+", default=CACHES, metavar="SPEC", help="caches to compare"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=80,
        metavar="N",
        help="decode steps; within 80 several blocks leave a window",
    )
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128, help="of the model")
    parser.add_argument(
        "--seconds", type=float, default=40, metavar="S", help="compare nothing more after so long"
    )
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="programs compiled at a time"
    )
    parser.add_argument(
        "--interpret", action="store_true", help="evaluate kernels with JAX, on any device"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.interpret:
        parser.exit(
            2,
            f"kernels need a GPU, this process runs on {jax.default_backend()}; --interpret runs"
            " them anyway\n",
        )
    report = GpuReport.here(
        "Parity of decode steps", ("benchmarks.gpu.step_parity", *arguments(argv))
    )
    on_gpus = ("asm", "jnp", *([] if route.missing() else ["mosaic"]))
    names = ("interpreted",) if args.interpret else on_gpus
    run(args.cache, names, args.head_dim, args.steps, report, args.json, args.threads, args.seconds)
    if report.skipped:
        progress(f"left out for lack of time: {'; '.join(report.skipped)}")
    return said_wrong(report) or int(not report.rows)


if __name__ == "__main__":
    leave(main())
