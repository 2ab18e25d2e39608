"""Measure a model's predictions through the real cache: the papers' tables and others, on one text.

Every cache that needs a calibration gets one, from samples of another text. With --stressed,
papers' tables run on two more variants of the model as well, with the same full-precision outputs
and outliers in keys or in values. A run that is stopped goes on where it was when the same command
is given again. Numbers in benchmarks/results come from the JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.quality.bench import add_arguments, run
from benchmarks.quality.suites import SUITES


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("suite", choices=tuple(SUITES), help="the comparisons")
    add_arguments(parser)
    parser.add_argument(
        "--stressed", action="store_true", help="measure the variants with outliers as well"
    )
    parser.add_argument(
        "--no-fake", action="store_true", help="leave out what papers simulate in one pass"
    )
    parser.add_argument("--only", metavar="WORDS", help="only tables whose title holds these words")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        run(SUITES[options.suite](), options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    print(options.json)


if __name__ == "__main__":
    main()
