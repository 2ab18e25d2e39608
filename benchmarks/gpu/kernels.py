"""GPU kernels against the memory's speed and the best bf16 code at hand: decode attention, its two
products, quantizing and packing.

Times are of loops of many calls (device_timing.py); those of small shapes may be of launches, as
the times without a token show. Errors are against the reference on the same codes, and one that
rounding does not explain ends the run with exit status 1. Cases run in the order of their weight
until the time is used up, and the file holds what was measured whenever the run ends. --resume goes
on with a file whose run was cut short. Printed at the end: the papers' tables with our times beside
theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.cpu.timing import Shape
from benchmarks.gpu import kvquant_candidates, paper_tables, polarquant_candidates
from benchmarks.gpu.attention_candidates import (
    FIRST_SPECS,
    MODELS,
    MORE_SPECS,
    SPECS,
    Planned,
    attention_tasks,
    shape_of,
)
from benchmarks.gpu.compiling import THREADS, leave
from benchmarks.gpu.device_timing import SHORT, Timing, bandwidth_samples
from benchmarks.gpu.innerq_candidates import (
    PAPER_MODELS,
    paper_shape,
    product_tasks,
    quantize_tasks,
)
from benchmarks.gpu.report import GpuReport, KernelRow, one_line
from benchmarks.gpu.timed_case import Entry, FatalError, entries_of, run_entries
from benchmarks.markdown import table
from benchmarks.report_file import arguments
from pallas_kernels.launch import Launch

SECTIONS = ("attention", "products", "quantize", "kvquant", "polarquant")
MAIN, KVQUANT = "Llama-3.1-8B", kvquant_candidates.MODEL
PARITY_SPECS = (
    *FIRST_SPECS,
    "kivi:bits=3",
    "innerq:bits=2,mode=asym",
    "innerq:bits=3,mode=sym",
    "innerq:bits=4",
    "innerq:bits=8,mode=asym",
)
LENGTHS = tuple(512 << i for i in range(9))  # 512 .. 131072
BATCHES = (1, 16)
WRONG, RESTART = (
    1,
    3,
)  # exit statuses: an error or a failure of our kernels; go on in another process, with --resume


@dataclasses.dataclass(frozen=True)
class Case:
    """All candidates of a section at one shape. Where the command line does not choose: both, in
    either arithmetic; specs, the caches that are attended to. brief: with few of others'
    candidates."""

    section: str
    model: str
    shape: Shape
    both: bool = False
    specs: tuple[str, ...] = SPECS
    brief: bool = False

    @property
    def tiny(self) -> Case:
        """Return the same case at a shape that takes no time."""
        tokens = 2048 if self.section == "kvquant" else 256
        return dataclasses.replace(
            self, shape=Shape(min(2, self.shape.batch), tokens, 64, 2, min(2, self.shape.group))
        )

    @property
    def name(self) -> str:
        caches = "" if self.specs == SPECS else f", {' '.join(self.specs)}"
        return (
            f"{self.section}, {self.model}, {self.shape.tokens} tokens, batch"
            f" {self.shape.batch}{caches}"
        )

    def tasks(self, launches: Sequence[Launch], specs: Sequence[str]) -> list[Planned]:
        if self.section == "attention":
            return attention_tasks(self.shape, launches, specs or self.specs, brief=self.brief)
        if self.section == "kvquant":
            return kvquant_candidates.table_tasks(self.shape, launches)
        if self.section == "polarquant":
            return polarquant_candidates.table_tasks(self.shape, launches)
        return (
            product_tasks(self.shape, launches)
            if self.section == "products"
            else quantize_tasks(self.shape, launches)
        )


def _attention(model: str, *points: tuple[int, int], **fields: Any) -> list[Case]:
    return [
        Case("attention", model, shape_of(model, tokens, batch), **fields)
        for tokens, batch in points
    ]


def _paper(section: str, *lengths: int, models: Sequence[str] = tuple(PAPER_MODELS)) -> list[Case]:
    return [
        Case(section, model, paper_shape(model, tokens)) for tokens in lengths for model in models
    ]


def first_cases() -> list[Case]:
    """Return what a run must have whatever happens after it: 32K tokens x 16 of Llama 3.1 8B, in
    either arithmetic."""
    return _attention(MAIN, (32768, 16), both=True, specs=FIRST_SPECS, brief=True)


def parity_cases() -> list[Case]:
    """Return small shapes, whose errors matter and not their times."""
    cases = _attention(MAIN, (1024, 2), both=True, specs=PARITY_SPECS, brief=True)
    cases += _attention("Llama-3.2-1B", (1024, 2), both=True, specs=FIRST_SPECS, brief=True)
    small = paper_shape(MAIN, 1024)
    return cases + [Case(section, MAIN, small, both=True) for section in ("products", "quantize")]


def next_cases() -> list[Case]:
    """Return what follows in the same ten minutes: other lengths and batches, then the products
    that the InnerQ paper times."""
    cases = [
        case
        for points in ((131072, 1), (4096, 16), (32768, 1))
        for case in _attention(MAIN, points, both=True, specs=FIRST_SPECS, brief=True)
    ]
    return cases + _paper("products", 131072, 32768, 8192, 2048, 512) + _paper("quantize", 32768)


def second_cases() -> list[Case]:
    """Return every shape of the table, MODELS x LENGTHS x BATCHES, and of the papers' tables, by
    weight, for a run of its own, because tables, polar keys and outliers take minutes to compile.
    Llama 3.1 8B comes first, and of it what shows most.
    """
    every = [(tokens, batch) for tokens in LENGTHS for batch in BATCHES]
    cases = [
        Case("kvquant", KVQUANT, shape_of(KVQUANT, tokens, 1))
        for tokens in paper_tables.KVQUANT_LENGTHS
    ]
    cases += _paper(
        "polarquant", *paper_tables.POLAR_LENGTHS, models=(polarquant_candidates.MODEL,)
    )
    cases += _attention(
        MAIN, (32768, 16), (131072, 1), (4096, 16), (32768, 1), (4096, 1), (131072, 16)
    )
    cases += _attention(MAIN, (32768, 16), both=True, specs=MORE_SPECS)
    others = [model for model in MODELS if model != MAIN]
    for model in others:
        cases += _attention(model, (32768, 16), (32768, 1))
    cases += _attention(MAIN, *every)
    cases += [*_paper("products", *LENGTHS), *_paper("quantize", 131072, 4096, 512)]
    for points in ((4096, 16), (4096, 1), (131072, 1), (131072, 16)), every:
        for model in others:
            cases += _attention(model, *points)
    return cases


PLANS: dict[str, Callable[[], list[Case]]] = {
    "first": first_cases,
    "parity": parity_cases,
    "next": next_cases,
    "second": second_cases,
    "all": lambda: first_cases() + next_cases() + second_cases(),
}


def planned_cases(plan: str) -> list[Case]:
    """Return the cases of a plan, each once."""
    first: dict[str, Case] = {}
    for case in PLANS[plan]():
        first.setdefault(case.name, case)
    return list(first.values())


def chosen_cases(shapes: Sequence[str], sections: Sequence[str], plan: str = "all") -> list[Case]:
    """Return the cases of a plan, or those of MODEL:TOKENS:BATCH. Raise ValueError naming an
    unknown part."""
    if not shapes:
        return [case for case in planned_cases(plan) if case.section in sections]
    chosen = []
    for text in shapes:
        model, *numbers = text.split(":")
        if (
            model not in MODELS
            or len(numbers) != 2
            or not all(n.isdigit() and int(n) for n in numbers)
        ):
            raise ValueError(
                f"shape {text!r}: write MODEL:TOKENS:BATCH; models: {', '.join(MODELS)}"
            )
        tokens, batch = map(int, numbers)
        cases = [Case("attention", model, shape_of(model, tokens, batch), both=True)]
        if model in PAPER_MODELS:
            cases += [
                Case(section, model, paper_shape(model, tokens))
                for section in ("products", "quantize")
            ]
        if (model, batch) == (polarquant_candidates.MODEL, 1):
            cases.append(Case("polarquant", model, paper_shape(model, tokens)))
        if (model, batch) == (KVQUANT, 1):
            cases.append(Case("kvquant", model, shape_of(model, tokens, batch)))
        chosen += [case for case in cases if case.section in sections]
    return chosen


def run(
    cases: Sequence[Case],
    report: GpuReport,
    path: str | os.PathLike[str],
    timing: Timing,
    *,
    launches: Sequence[Launch] = (),
    specs: Sequence[str] = (),
    seconds: float = float("inf"),
    threads: int = 1,
) -> None:
    """Measure what the report lacks, until the time is used up; what was not reached is among its
    skipped.

    launches, specs: options that kernels are launched with and caches that they attend to, where
    not as each case says.
    """

    def save() -> None:
        report.write(path)

    start = time.monotonic()
    crashed = note_crash(report)
    measure_bandwidth(report, timing)
    report.skipped.clear()
    done, entries, cases_of = {row.case for row in report.rows}, list[Entry](), dict[tuple, Case]()
    for case in cases:
        own = launches or ([Launch("asm"), Launch("jnp")] if case.both else [Launch("asm")])
        for entry in entries_of(case.model, case.shape, case.tasks(own, specs)):
            if entry.blank.case not in done and cases_of.setdefault(entry.blank.case, case) is case:
                entries.append(entry)
    progress(f"{len(entries)} candidates of {len(cases)} shapes, {threads} compiled at a time")

    def told(rows: Sequence[KernelRow]) -> None:
        place = (
            f"{time.monotonic() - start:5.0f} s  {rows[0].section}, {rows[0].model},"
            f" {rows[0].shape.tokens} x {rows[0].shape.batch}"
        )
        for row in rows:
            progress(f"{place}: {summary(report, row)}")

    suspects = [entry for entry in entries if entry.blank.case in crashed]
    others = [entry for entry in entries if entry.blank.case not in crashed]
    late = run_entries(others, report, save, timing, threads, start + seconds, told)
    late += run_entries(suspects, report, save, timing, 1, start + seconds, told)
    missed: dict[str, list[str]] = {}
    for row in late:
        missed.setdefault(cases_of[row.case].name, []).append(row.name)
    wanted = Counter(cases_of[entry.blank.case].name for entry in entries)
    for name, candidates in missed.items():
        report.skipped.append(
            name if len(candidates) == wanted[name] else f"{name}: {', '.join(candidates)}"
        )
    save()


def note_crash(report: GpuReport) -> set[tuple[str, str, Shape, str, str]]:
    """Note where an earlier process ended without a word: the one candidate that ran gets a row
    that says so; of several that were being compiled, the keys are returned, to be tried one by
    one."""
    running = list(report.running)
    report.running.clear()
    if len(running) == 1:
        report.rows.append(
            dataclasses.replace(
                running[0], failure="the process ended while this was compiled or timed"
            )
        )
        return set()
    return {row.case for row in running}


def measure_bandwidth(report: GpuReport, timing: Timing) -> None:
    """Measure the yardstick: bytes a second of a large copy, and of reading alone."""
    if report.median_rate("copy"):
        return
    shape = Shape(1, 0, 0, 0, 0)
    try:
        measured = bandwidth_samples(timing)
    except Exception as error:
        report.rows.append(KernelRow("bandwidth", "", shape, "copy", failure=one_line(error)))
        return
    for name, (size, samples) in measured.items():
        report.rows.append(
            KernelRow(
                "bandwidth",
                "",
                shape,
                name,
                moved_bytes=size,
                copies=1,
                cold=True,
                samples_ms=samples,
            )
        )
        progress(f"{name}: {report.rows[-1].rate / 1e12:.2f} TB/s")


def summary(report: GpuReport, row: KernelRow) -> str:
    """Return a row as a line of progress."""
    if not row.samples_ms:
        return f"{row.name:50s} {row.failure or row.remark}"
    share, ratio = report.share(row), report.ratio(row)
    parts = [
        f"{row.name:50s} {1e3 * row.median_ms:10.1f} us",
        f"{share:5.0%}" if share else "    -",
        f"{ratio:6.2f}x" if ratio else "      -",
    ]
    return " ".join([*parts, "" if row.error is None else f"{row.error:.1e}", row.failure])


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kernels",
        description=(__doc__ or "").partition("\n")[0],
        epilog=(
            "example: python -m benchmarks.gpu.kernels --json benchmarks/results/kernels_h200.json"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", required=True, help="where the rows go, after every candidate"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="MODEL:TOKENS:BATCH",
        help=f"not the usual ones; models: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--plan",
        choices=PLANS,
        default="all",
        help="shapes and caches: gpu.sh's stages, or all of them",
    )
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to measure"
    )
    parser.add_argument(
        "--cache",
        nargs="+",
        default=[],
        metavar="SPEC",
        help=f"caches whose kernels attend, not {' '.join(SPECS)}",
    )
    parser.add_argument(
        "--arithmetic",
        nargs="+",
        choices=("asm", "jnp"),
        default=[],
        help="of the kernels; both at some shapes if not given",
    )
    parser.add_argument(
        "--seconds", type=float, default=330, metavar="S", help="time nothing more after so long"
    )
    parser.add_argument(
        "--threads", type=int, default=THREADS, metavar="N", help="programs compiled at a time"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the file where its run ended"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small shape, few samples: to see that it works; not a measurement",
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="evaluate kernels with JAX, on any device; not a measurement",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the plan's cases at a few hundred tokens, each once; not a measurement",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        cases = chosen_cases(
            args.shapes or (["Llama-3.2-1B:512:1"] if args.quick else []), args.sections, args.plan
        )
        if args.tiny:
            cases = list({case.name: case for case in (case.tiny for case in cases)}.values())
        if jax.default_backend() != "gpu" and not args.interpret:
            raise ValueError(
                f"kernels need a GPU, this process runs on {jax.default_backend()}; --interpret"
                " runs them anyway"
            )
        report = GpuReport.here("GPU kernels", ("benchmarks.gpu.kernels", *arguments(argv)))
        if args.resume and pathlib.Path(args.json).exists():
            report = report.resumed(GpuReport.read(args.json))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    launches = (
        [Launch(interpret=True)]
        if args.interpret
        else [Launch(arithmetic) for arithmetic in args.arithmetic]
    )
    timing = (
        SHORT if args.quick or args.tiny or args.interpret or args.plan == "parity" else Timing()
    )
    try:
        run(
            cases,
            report,
            args.json,
            timing,
            launches=launches,
            specs=args.cache,
            seconds=args.seconds,
            threads=args.threads,
        )
    except FatalError as error:
        parser.exit(RESTART, f"the GPU failed: {error}; go on with --resume\n")
    except KeyboardInterrupt:
        report.running.clear()
        report.write(args.json)
        parser.exit(130, f"interrupted; {args.json} holds {len(report.rows)} rows\n")
    failures = sum(bool(row.failure) for row in report.rows)
    for made_table in paper_tables.tables(report):
        print(
            "\n\n".join(
                (
                    f"### {made_table.title}",
                    made_table.note,
                    table(made_table.header, made_table.lines),
                )
            ),
            end="\n\n",
        )
    progress(
        f"{args.json}: {len(report.rows)} rows, {failures} with failures; {len(report.skipped)}"
        " shapes left out for lack of time"
    )
    if report.skipped:
        progress(f"left out: {'; '.join(report.skipped)}")
    return said_wrong(report)


def said_wrong(report: GpuReport) -> int:
    """Print what is wrong with any row of a report; return the exit status that follows."""
    for line in (wrong := report.wrong()):
        progress(f"WRONG {line}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    leave(main())
