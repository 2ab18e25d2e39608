"""Instructions of decode attention by both routes to a GPU, side by side: Mosaic GPU, and Triton's
assembly.

Compiled on any machine for GPUs that are not there, each in a process of its own: in one that has
compiled a kernel on Mosaic GPU for another, ptxas refuses the target. Needs the extra `aot`, and
JAX 0.11 or later for Mosaic GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import get_args

from benchmarks.machine_code.attentions import ATTENTIONS, KERNELS
from benchmarks.machine_code.report import HEADER, Instructions, KernelReport, named_by_spec
from benchmarks.machine_code.target import BY_NAME
from benchmarks.machine_code.tools import missing
from benchmarks.markdown import table
from benchmarks.progress import progress
from benchmarks.report_file import arguments
from pallas_kernels.launch import KernelRoute
from pallas_kernels.mosaic import route as mosaic

TARGETS = ("h200", "a100", "b200", "l40")
COMPARED = ("cache", "budget, h200", *TARGETS, "JAX {version} differs by")


def compared(
    rows: Iterable[KernelReport], of_other_jax: Iterable[KernelReport]
) -> list[tuple[str, ...]]:
    """Return lines under COMPARED: instructions for each element by Mosaic GPU and by Triton, if it
    reads the format, and how far Mosaic GPU's are from the counts with another JAX, at most."""
    counted = {(row.name, row.target): row for row in rows}
    others = {(row.name, row.target): row for row in of_other_jax}
    names = dict.fromkeys(name.rpartition(", ")[0] for name, _ in counted)

    def instructions(name: str, target: str) -> str:
        """Return "Mosaic GPU's / Triton's"."""
        return " / ".join(
            f"{counted[key].instructions_per_element:.2f}"
            for route in KERNELS
            if (key := (f"{name}, {route}", target)) in counted
        )

    def difference(name: str) -> float:
        keys = [(f"{name}, mosaic", target) for target in TARGETS]
        return max(
            abs(counted[key].instructions_per_element - others[key].instructions_per_element)
            for key in keys
            if key in others
        )

    return [
        (
            named_by_spec(name),
            f"{counted[f'{name}, mosaic', 'h200'].budget:.2f}",
            *(instructions(name, target) for target in TARGETS),
            f"{difference(name):.2f}",
        )
        for name in names
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. The exit status is 1 if a case breaks its limits, 2 if nothing can be
    compiled."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_code.routes",
        description=(__doc__ or "").partition("\n")[0],
        epilog="All cases take half an hour. A run that breaks its limits writes its counts too.",
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts here, after each case")
    parser.add_argument(
        "--case", metavar="REGEX", default="", help="only cases whose name has a match of this"
    )
    parser.add_argument(
        "--target", nargs="+", choices=BY_NAME, default=TARGETS, help="the GPUs (default: all)"
    )
    parser.add_argument(
        "--route",
        nargs="+",
        choices=get_args(KernelRoute),
        default=list(KERNELS),
        help="the routes (default: both)",
    )
    args = parser.parse_args(argv)
    if lacking := missing() or ("mosaic" in args.route and mosaic.missing()):
        parser.exit(2, f"{lacking}\n")
    rows: list[KernelReport] = []
    failures: list[str] = []
    command = ("benchmarks.machine_code.routes", *arguments(argv))
    for row, broken in _measured(args.case, args.route, args.target):
        rows.append(row)
        failures += broken
        progress(" | ".join(row.line()))
        if args.json:
            Instructions.of(rows, command).write(args.json)
    if not rows:
        names = ", ".join(attention.name for attention in ATTENTIONS)
        parser.exit(2, f"no case matches {args.case!r}: {names}\n")
    print(table(HEADER, (row.line() for row in rows)))
    if failures:
        parser.exit(1, "\n".join(["limits broken:", *failures, ""]))


def _measured(
    pattern: str, routes: Sequence[KernelRoute], targets: Sequence[str]
) -> Iterator[tuple[KernelReport, list[str]]]:
    """Compile the cases, one after the other, and yield each with the limits that it breaks."""
    chosen = [i for i, one in enumerate(ATTENTIONS) if re.search(pattern, one.name)]
    spawn = multiprocessing.get_context("spawn")
    for target in targets:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            of_target = [
                (i, route, target) for i in chosen for route in routes if ATTENTIONS[i].by(route)
            ]
            yield from process.map(_measure, *zip(*of_target, strict=True))


def _measure(
    attention: int, route: KernelRoute, target_name: str
) -> tuple[KernelReport, list[str]]:
    target = BY_NAME[target_name]
    case = ATTENTIONS[attention].case(route, target)
    row = case.measure(target)
    return row, case.failures(row)


if __name__ == "__main__":
    main()
