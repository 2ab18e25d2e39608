"""Measure the papers' tables of quality through the real cache, on one text.

With --stressed, tables also run on two variants of the model that have the same exact outputs and
outliers in keys or in values.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.__main__ import argument_parser, run_suite
from laboratory.quality.suites import SUITES


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(SUITES, "laboratory.quality", __doc__)
    parser.add_argument(
        "--stressed", action="store_true", help="measure the variants with outliers as well"
    )
    run_suite(parser, SUITES, argv)


if __name__ == "__main__":
    main()
