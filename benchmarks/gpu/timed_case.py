"""Compile and time the candidates of one case: compiled side by side, then timed one after the other with the GPU to themselves."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu.timing import Shape, relative_error
from benchmarks.gpu.attention_candidates import Planned, Task
from benchmarks.gpu.device_timing import Timing, sampled_ms, timing_loop
from benchmarks.gpu.report import GpuReport, KernelRow, is_fatal, one_line

MEMORY_LIMIT = 100 << 30  # bytes of a candidate's copies and temporaries
SEED = jax.ShapeDtypeStruct((), jnp.uint32)


class FatalError(Exception):
    """The GPU is of no use to this process any more. The message is the cause."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """The compiled loop of one arithmetic: `calls` calls. check: (found, wanted), None for a task without. Or why there is none."""

    arithmetic: str
    calls: int = 0
    loop: Callable[..., Any] | None = None
    check: Callable[..., Any] | None = None
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A task ready to run. start: makes x. copy: makes the arrays of one from a seed."""

    task: Task
    copies: int
    start: Callable[..., Any]
    copy: Callable[..., Any]
    variants: tuple[Variant, ...]


def compile_task(make: Callable[[], Task], timing: Timing) -> Compiled:
    """Compile all that a task needs; its variants name what failed. Raise ValueError where the candidate cannot serve its shape."""
    task = make()
    copies = timing.copies(task.copy_bytes)
    needed = copies * task.copy_bytes + task.temp_bytes
    if needed > MEMORY_LIMIT:
        raise ValueError(f"needs {needed / 2**30:.0f} GiB of at most {MEMORY_LIMIT / 2**30:.0f}")
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, SEED)
    steps = timing.steps(task.moved_bytes, copies)
    variants, check = [], None
    for arithmetic, call in task.calls:
        try:
            loop = jax.jit(timing_loop(call, task.feed, steps)).lower(x, [copy] * copies).compile()
            if task.check is not None:
                check = check or jax.jit(task.check).lower(x, copy, jax.eval_shape(call, x, copy)).compile()
            variants.append(Variant(arithmetic, steps * copies + 1, loop, check))
        except Exception as error:  # whatever a compiler may raise concerns this variant alone
            variants.append(Variant(arithmetic, failure=one_line(error)))
    return Compiled(task, copies, jax.jit(task.start).lower().compile(), jax.jit(task.copy).lower(SEED).compile(), tuple(variants))


def run_case(
    model: str, shape: Shape, tasks: Sequence[Planned], report: GpuReport, save: Callable[[], None], timing: Timing, threads: int
) -> None:
    """Add rows for each candidate to the report, and save it. Raise FatalError where only a new process can go on."""
    blanks = [KernelRow(task.section, model, shape, task.candidate) for task in tasks]

    def running(*rows: KernelRow) -> None:
        report.running[:] = rows
        save()

    compiled: list[Compiled | str] = []
    if threads > 1:
        running(*blanks)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            compiled = list(pool.map(lambda task: _compiled_or_failure(task, timing), tasks))
    for i, (task, blank) in enumerate(zip(tasks, blanks, strict=True)):
        running(blank)
        item = compiled[i] if compiled else _compiled_or_failure(task, timing)
        if compiled:
            compiled[i] = ""  # its programs go when it is done
        rows = [dataclasses.replace(blank, failure=item)] if isinstance(item, str) else timed_rows(item, blank, timing)
        report.rows.extend(rows)
        if fatal := [row.failure for row in rows if is_fatal(row.failure)]:
            running()
            raise FatalError(fatal[0])
    running()


def _compiled_or_failure(task: Planned, timing: Timing) -> Compiled | str:
    try:
        return compile_task(task.make, timing)
    except Exception as error:
        return one_line(error)


def timed_rows(item: Compiled, blank: KernelRow, timing: Timing) -> list[KernelRow]:
    """Time a task's variants and return their rows; its arrays live only here."""
    task = item.task
    cold = timing.is_cold(task.copy_bytes)
    row = dataclasses.replace(blank, bf16=task.bf16, moved_bytes=task.moved_bytes, copies=item.copies, cold=cold, remark=task.remark)
    rows = [dataclasses.replace(row, arithmetic=variant.arithmetic, failure=variant.failure) for variant in item.variants]
    if not any(variant.loop for variant in item.variants):
        return rows
    try:
        x = item.start()
        copies = [item.copy(jnp.uint32(i + 1)) for i in range(item.copies)]
        jax.block_until_ready(copies)
    except Exception as error:
        return [dataclasses.replace(row, failure=row.failure or one_line(error)) for row in rows]
    return [_timed(row, variant, task, x, copies, timing) for row, variant in zip(rows, item.variants, strict=True)]


def _timed(row: KernelRow, variant: Variant, task: Task, x: Any, copies: list[Any], timing: Timing) -> KernelRow:
    loop, check = variant.loop, variant.check
    if loop is None:
        return row
    try:
        samples = sampled_ms(lambda: loop(x, copies), variant.calls, timing.samples)
        row = dataclasses.replace(row, samples_ms=samples)
        if task.idle is not None:
            idle = task.idle(x)
            row = dataclasses.replace(row, idle_ms=float(np.median(sampled_ms(lambda: loop(idle, copies), variant.calls, 3))))
        if check is None:
            return row
        last, out = loop(x, copies)
        return dataclasses.replace(row, error=relative_error(*check(last, copies[-1], out)))
    except Exception as error:
        return dataclasses.replace(row, failure=one_line(error))
