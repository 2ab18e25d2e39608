"""Instructions per cached element of the GPU kernels, from their machine code: compiled for an H200
and an A100 on any machine.

The numbers are of the main loop alone and say what the instructions allow, not how fast a kernel
runs. Needs the extra `aot`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence

from benchmarks.machine_code.cases import CASES
from benchmarks.machine_code.other_cases import OTHER_CASES
from benchmarks.machine_code.report import HEADER, Instructions, KernelReport
from benchmarks.machine_code.target import TARGETS
from benchmarks.machine_code.tools import missing
from benchmarks.markdown import table
from benchmarks.progress import progress
from benchmarks.report_file import arguments

WATCHED = (*CASES, *OTHER_CASES)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. The exit status is 1 if a case breaks its limits, 2 if nothing can be
    compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code",
        description=(__doc__ or "").partition("\n")[0],
        epilog=(
            "example: python -m benchmarks.machine_code --json benchmarks/results/instructions.json"
        ),
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts here")
    parser.add_argument(
        "--case", metavar="REGEX", default="", help="only cases whose name has a match of this"
    )
    parser.add_argument(
        "--target",
        nargs="+",
        choices=TARGETS,
        default=list(TARGETS),
        help="the GPUs (default: all)",
    )
    args = parser.parse_args(argv)
    cases = [case for case in WATCHED if re.search(args.case, case.name)]
    if not cases:
        parser.exit(
            2, f"no case matches {args.case!r}: {', '.join(case.name for case in WATCHED)}\n"
        )
    if lacking := missing():
        parser.exit(2, f"{lacking}\n")
    rows: list[KernelReport] = []
    failures: list[str] = []
    work = [(case, TARGETS[name]) for case in cases for name in args.target]
    for i, (case, target) in enumerate(work):
        start = time.perf_counter()
        progress(f"[{i + 1}/{len(work)}] {case.name} for {target.name}: compiling")
        rows.append(case.measure(target))
        failures += case.failures(rows[-1])
        progress(
            f"    {rows[-1].instructions_per_element:.2f} per element,"
            f" {time.perf_counter() - start:.1f} s"
        )
    if args.json:
        Instructions.of(rows, ("benchmarks.machine_code", *arguments(argv))).write(args.json)
    print(table(HEADER, (row.line() for row in rows)))
    if failures:
        parser.exit(1, "\n".join(["limits broken:", *failures, ""]))


if __name__ == "__main__":
    main()
