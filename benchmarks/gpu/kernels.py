"""GPU kernels against the memory's speed and the best bf16 code at hand: decode attention,
quantizing and packing.

Times are of loops of many calls (device_timing.py). At small shapes they may be times of launches,
as the times without a token show. Errors are against the reference on the same codes. If rounding
does not explain one, the run ends with exit status 1. Cases run in the order of their weight until
the time is used up, and the file is complete after every row. --resume continues a file whose run
was cut short.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import time
from collections import Counter
from collections.abc import Sequence

import jax

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import MODELS, SPECS
from benchmarks.gpu.compiling import THREADS, leave
from benchmarks.gpu.device_timing import SHORT, Timing, bandwidth_samples
from benchmarks.gpu.plans import PLANS, Case, Plans
from benchmarks.gpu.report import GpuReport, KernelRow, one_line
from benchmarks.gpu.timed_case import Entry, FatalError, entries_of, run_entries
from benchmarks.progress import progress
from benchmarks.report_file import arguments
from pallas_kernels.launch import Launch

# exit statuses: our kernels erred or failed, or another process must go on with --resume
WRONG, RESTART = 1, 3


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
    """Measure what the report lacks until the time is used up. The rest is listed as skipped.

    launches: options of kernels, instead of each case's.
    specs: caches that are attended to, instead of each case's.
    """

    def save() -> None:
        report.write(path)

    start = time.monotonic()
    crashed = note_crash(report)
    measure_bandwidth(report, timing)
    report.skipped.clear()
    done, entries, cases_of = {row.case for row in report.rows}, list[Entry](), dict[tuple, Case]()
    for case in cases:
        timed = launches or case.launches
        for entry in entries_of(case.model, case.shape, case.tasks(timed, specs)):
            if entry.blank.case not in done and cases_of.setdefault(entry.blank.case, case) is case:
                entries.append(entry)
    progress(f"{len(entries)} candidates of {len(cases)} shapes, {threads} compiled at a time")

    def show(rows: Sequence[KernelRow]) -> None:
        place = (
            f"{time.monotonic() - start:5.0f} s  {rows[0].section}, {rows[0].model},"
            f" {rows[0].shape.tokens} x {rows[0].shape.batch}"
        )
        for row in rows:
            progress(f"{place}: {summary(report, row)}")

    suspects = [entry for entry in entries if entry.blank.case in crashed]
    others = [entry for entry in entries if entry.blank.case not in crashed]
    late = run_entries(others, report, save, timing, threads, start + seconds, show)
    late += run_entries(suspects, report, save, timing, 1, start + seconds, show)
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
    """Note the candidate at which an earlier process ended without a word.

    If one candidate ran, it gets a row that says so. If several were being compiled, return their
    keys, so that they are tried one by one.
    """
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


def argument_parser(
    plans: Plans = PLANS, module: str = "benchmarks.gpu.kernels"
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=f"example: python -m {module} --json benchmarks/results/kernels_h200.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", required=True, help="file of the rows, written after each"
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
        choices=plans.stages,
        default="all",
        help="shapes and caches: gpu.sh's stages, or all of them",
    )
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=plans.sections,
        default=plans.sections,
        help="what to measure",
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
    return said_wrong(measured(argv, PLANS, "GPU kernels", "benchmarks.gpu.kernels"))


def measured(argv: Sequence[str] | None, plans: Plans, title: str, module: str) -> GpuReport:
    """Run the command `module` over its plans, write its file, and return its report."""
    parser = argument_parser(plans, module)
    args = parser.parse_args(argv)
    try:
        shapes = args.shapes or (["Llama-3.2-1B:512:1"] if args.quick else [])
        cases = plans.chosen(shapes, args.sections, args.plan)
        if args.tiny:
            cases = list({case.name: case for case in (case.tiny for case in cases)}.values())
        if jax.default_backend() != "gpu" and not args.interpret:
            raise ValueError(
                f"kernels need a GPU, this process runs on {jax.default_backend()}; --interpret"
                " runs them anyway"
            )
        report = GpuReport.here(title, (module, *arguments(argv)))
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
    progress(
        f"{args.json}: {len(report.rows)} rows, {failures} with failures; {len(report.skipped)}"
        " shapes left out for lack of time"
    )
    if report.skipped:
        progress(f"left out: {'; '.join(report.skipped)}")
    return report


def said_wrong(report: GpuReport) -> int:
    """Print every wrong row of a report and return the exit status."""
    for line in (wrong := report.wrong()):
        progress(f"WRONG {line}")
    return WRONG if wrong else 0


if __name__ == "__main__":
    leave(main())
