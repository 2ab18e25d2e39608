"""Compile and time candidates: all of a shape are compiled side by side, and then timed one after
the other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cpu.timing import Shape, relative_error
from benchmarks.gpu.attention_candidates import Planned, Task
from benchmarks.gpu.compiling import compiled_first
from benchmarks.gpu.device_timing import Timing, memory_limit, sampled_ms, timing_loop
from benchmarks.gpu.report import GpuReport, KernelRow, is_fatal, one_line

SEED = jax.ShapeDtypeStruct((), jnp.uint32)


class TooLargeError(ValueError):
    """A candidate's arrays do not fit the device. The message says how much is needed."""


class FatalError(Exception):
    """The GPU is of no use to this process any more. The message is the cause."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """The compiled loop of one arithmetic, of `calls` calls, or why there is none. check: returns
    (output, wanted), or is None for a task without a reference."""

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
    """Compile the programs of a task. Its variants name what failed.

    Raises ValueError if the candidate cannot serve its shape.
    """
    task = make()
    copies = timing.copies(task.copy_bytes)
    needed = copies * task.copy_bytes + task.temp_bytes
    if needed > memory_limit():
        raise TooLargeError(f"needs {needed / 2**30:.1f} GiB of {memory_limit() / 2**30:.1f}")
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, SEED)
    steps = timing.steps(task.moved_bytes, copies)
    variants, check = [], None
    for arithmetic, call in task.calls:
        try:
            loop = jax.jit(timing_loop(call, task.feed, steps)).lower(x, [copy] * copies).compile()
            if task.check is not None:
                check = (
                    check
                    or jax.jit(task.check).lower(x, copy, jax.eval_shape(call, x, copy)).compile()
                )
            variants.append(Variant(arithmetic, steps * copies + 1, loop, check))
        except Exception as error:  # whatever a compiler may raise concerns this variant alone
            variants.append(Variant(arithmetic, failure=one_line(error)))
    return Compiled(
        task,
        copies,
        jax.jit(task.start).lower().compile(),
        jax.jit(task.copy).lower(SEED).compile(),
        tuple(variants),
    )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A candidate to compile and time, and the empty row that it fills."""

    blank: KernelRow
    make: Callable[[], Task]


def entries_of(model: str, shape: Shape, tasks: Sequence[Planned]) -> list[Entry]:
    """Return an entry for each arithmetic of each task, so that neither waits for the compilation
    of the other."""
    entries = []
    for planned in tasks:
        blank = KernelRow(planned.section, model, shape, planned.candidate)
        try:
            task = planned.make()
        except Exception:  # made again later, for a row that says why it failed
            entries.append(Entry(blank, planned.make))
            continue
        for arithmetic, call in task.calls:
            one = dataclasses.replace(task, calls=((arithmetic, call),))
            row = dataclasses.replace(blank, arithmetic=arithmetic)
            entries.append(Entry(row, lambda one=one: one))
    return entries


def run_entries(
    entries: Sequence[Entry],
    report: GpuReport,
    save: Callable[[], None],
    timing: Timing,
    threads: int,
    until: float = float("inf"),
    show: Callable[[Sequence[KernelRow]], None] = lambda rows: None,
) -> list[KernelRow]:
    """Add rows for each candidate to the report, save it and tell of them. Return the empty rows of
    those that were not timed by `until`, on the clock of time.monotonic. Raises FatalError if only
    a new process can go on."""
    waiting = {entry.blank.case: entry.blank for entry in entries}
    compiling: dict[object, KernelRow] = {}

    def running(*rows: KernelRow) -> None:
        report.running[:] = rows
        save()

    def compiled(entry: Entry) -> Compiled | Callable[[KernelRow], KernelRow]:
        compiling[entry.blank.case] = entry.blank
        if threads == 1:
            running(entry.blank)
        return _compiled_or_failure(entry, timing)

    def ready(entry: Entry) -> None:
        del compiling[entry.blank.case]
        running(*list(compiling.values()))

    batches = itertools.groupby(entries, lambda entry: entry.blank.shape)
    for entry, item in compiled_first(compiled, batches, threads, until, ready):
        del waiting[entry.blank.case]
        running(entry.blank)  # the likely cause if the process ends now
        rows = (
            timed_rows(item, entry.blank, timing)
            if isinstance(item, Compiled)
            else [item(entry.blank)]
        )
        report.rows.extend(rows)
        show(rows)
        if fatal := [row.failure for row in rows if is_fatal(row.failure)]:
            running()
            raise FatalError(fatal[0])
        running()
    return list(waiting.values())


def _compiled_or_failure(
    entry: Entry, timing: Timing
) -> Compiled | Callable[[KernelRow], KernelRow]:
    """Return the task ready to run, or what makes of an empty row one that says why there is
    none."""
    try:
        return compile_task(entry.make, timing)
    except TooLargeError as error:
        said = f"left out: {error}"
        return lambda row: dataclasses.replace(row, remark=said)
    except Exception as error:
        reason = one_line(error)
        return lambda row: dataclasses.replace(row, failure=reason)


def timed_rows(item: Compiled, blank: KernelRow, timing: Timing) -> list[KernelRow]:
    """Time a task's variants and return their rows. Its arrays live only during this call."""
    task = item.task
    cold = timing.is_cold(task.copy_bytes)
    row = dataclasses.replace(
        blank,
        bf16=task.bf16,
        moved_bytes=task.moved_bytes,
        copies=item.copies,
        cold=cold,
        remark=task.remark,
    )
    rows = [
        dataclasses.replace(row, arithmetic=variant.arithmetic, failure=variant.failure)
        for variant in item.variants
    ]
    if not any(variant.loop for variant in item.variants):
        return rows
    try:
        x = item.start()
        copies = [item.copy(jnp.uint32(i + 1)) for i in range(item.copies)]
        jax.block_until_ready(copies)
    except Exception as error:
        return [dataclasses.replace(row, failure=row.failure or one_line(error)) for row in rows]
    return [
        _timed(row, variant, task, x, copies, timing)
        for row, variant in zip(rows, item.variants, strict=True)
    ]


def _timed(
    row: KernelRow, variant: Variant, task: Task, x: Any, copies: list[Any], timing: Timing
) -> KernelRow:
    loop, check = variant.loop, variant.check
    if loop is None:
        return row
    try:
        samples = sampled_ms(lambda: loop(x, copies), variant.calls, timing.samples)
        row = dataclasses.replace(row, samples_ms=samples)
        if task.idle is not None:
            idle = task.idle(x)
            row = dataclasses.replace(
                row,
                idle_ms=float(np.median(sampled_ms(lambda: loop(idle, copies), variant.calls, 3))),
            )
        if check is None:
            return row
        last, out = loop(x, copies)
        return dataclasses.replace(row, error=relative_error(*check(last, copies[-1], out)))
    except Exception as error:
        return dataclasses.replace(row, failure=one_line(error))
