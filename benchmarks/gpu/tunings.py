"""Time decode attention on a GPU in several tunings: tiles, stages of copies and programs on a
multiprocessor. The default tunings fill the shared memory; only a device shows what is fastest.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

import jax

from benchmarks.gpu.attention_candidates import shape_of, tuned_tasks
from benchmarks.gpu.compiling import THREADS, leave
from benchmarks.gpu.device_timing import Timing
from benchmarks.gpu.kernels import measure_bandwidth, said_wrong, summary
from benchmarks.gpu.plans import MAIN
from benchmarks.gpu.report import GpuReport
from benchmarks.gpu.timed_case import entries_of, run_entries
from benchmarks.points import points_of
from benchmarks.progress import progress
from benchmarks.report_file import arguments
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch

SPECS = ("kivi:bits=2", "kivi:bits=4", "innerq:bits=2", "nf4", "dense")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.tunings",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", required=True, help="file of the rows")
    parser.add_argument("--cache", nargs="+", default=SPECS, metavar="SPEC", help="caches")
    parser.add_argument("--route", choices=("triton", "mosaic"), default="mosaic", help="route")
    for name, values in (("tile", (64, 128, 256)), ("stages", (2, 3, 4, 6)), ("resident", (2, 3))):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=values, metavar="N")
    parser.add_argument("--warps", type=int, default=4, help="of a program; Triton's default is 1")
    parser.add_argument("--point", default="32768:16", metavar="TOKENS:BATCH", help="shape")
    parser.add_argument("--seconds", type=float, default=90, metavar="S", help="time at most")
    parser.add_argument("--threads", type=int, default=THREADS, metavar="N", help="compilers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    try:
        [(tokens, batch)] = points_of([args.point])
        if jax.default_backend() != "gpu":
            raise ValueError(f"kernels need a GPU, this process runs on {jax.default_backend()}")
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    shape, timing = shape_of(MAIN, tokens, batch), Timing(samples=5)
    report = GpuReport.here("Tunings", ("benchmarks.gpu.tunings", *arguments(argv)))
    measure_bandwidth(report, timing)
    tunings = [
        Tuning(tile, args.warps, stages, resident=resident)
        for tile, stages, resident in itertools.product(args.tile, args.stages, args.resident)
    ]
    launch = Launch("asm", route=args.route)
    tasks = [task for spec in args.cache for task in tuned_tasks(shape, spec, launch, tunings)]
    run_entries(
        entries_of(MAIN, shape, tasks),
        report,
        lambda: report.write(args.json),
        timing,
        args.threads,
        time.monotonic() + args.seconds,
    )
    for row in sorted(report.rows, key=lambda row: (row.name.split(", ")[0], row.median_ms)):
        progress(summary(report, row))
    return said_wrong(report)


if __name__ == "__main__":
    leave(main())
