"""Measure a model's predictions through the real cache on one text: the papers' tables of quality.

Caches that learn are calibrated on samples of another text. With --stressed, tables also run on two
variants of the model that have the same exact outputs and outliers in keys or in values. If a run
is stopped, the same command continues it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from laboratory.quality.bench import add_arguments, run
from laboratory.quality.suites import SUITES


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.quality",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(module="laboratory.quality")
    parser.add_argument("suite", choices=tuple(SUITES), help="the comparisons")
    add_arguments(parser)
    parser.add_argument(
        "--no-fake", action="store_true", help="leave out what papers simulate in one pass"
    )
    parser.add_argument("--only", metavar="WORDS", help="only tables whose title holds these words")
    parser.add_argument(
        "--stressed", action="store_true", help="measure the variants with outliers as well"
    )
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
