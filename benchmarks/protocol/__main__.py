"""Measure caches by the protocol of docs/evaluation.md: equal windows, two readings, three domains.

Rows are written as they come. The same command continues a run that was stopped, and --hours stops
it by itself. --dry-run says what it will cost.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.protocol import dry_run
from benchmarks.protocol.bench import Bench, recompute
from benchmarks.protocol.plan import DOMAINS, Plan, planned
from benchmarks.protocol.report import ProtocolReport
from kvq_tools.evaluation.protocol import READINGS, Sizes

CONTEXTS = 2048, 4096
ROWS = 3  # of --recompute


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.protocol",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="a directory, a GGUF file or a name")
    add(
        "--text",
        metavar="DOMAIN=FILE",
        action="append",
        default=[],
        help=f"a text of {', '.join(DOMAINS)}; `code` has a default, `passage` is a short one",
    )
    add(
        "--calibration-text",
        metavar="DOMAIN=FILE",
        help="what methods with parameters learn from; other domains are the headline",
    )
    add("--contexts", metavar="N", type=int, nargs="+", default=CONTEXTS, help="tokens before")
    add("--readings", choices=READINGS, nargs="+", default=READINGS, help="ways of reading")
    add("--scored", type=int, default=Sizes.scored, help="scored tokens of a window")
    add("--windows", type=int, default=Sizes.windows, help="windows of each text")
    add(
        "--caches",
        metavar="SPEC",
        nargs="+",
        help="these caches alone, or plans by name (default: all methods)",
    )
    add("--samples", type=int, default=16, help="calibration samples")
    add("--length", type=int, default=1024, help="tokens of a calibration sample")
    add("--json", metavar="FILE", type=pathlib.Path, required=True, help="where the rows go")
    add("--hours", type=float, help="start no further row after this time")
    add("--dry-run", action="store_true", help="say what the run will cost, without weights")
    add(
        "--recompute",
        metavar="ROWS",
        type=int,
        nargs="?",
        const=ROWS,
        help="measure the cheapest rows of the file again and compare printed digits",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        plan = Plan.of(options)
        if options.dry_run:
            print(dry_run.table_of(plan))
        elif options.recompute is not None:
            report = ProtocolReport.read(options.json)
            lines, equal = recompute(plan, report, options.recompute)
            print("\n".join(lines))
            parser.exit(0 if equal else 1)
        else:
            bench = Bench(plan)
            bench.run(planned(plan), options.hours)
            print(options.json, file=sys.stderr)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
