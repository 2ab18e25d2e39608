"""Measure a model's predictions through the real cache: all methods at equal bits, on one text.

Caches that learn are calibrated on samples of another text. If a run is stopped, the same command
continues it. Papers' own tables: `python -m laboratory.quality`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from benchmarks.quality.bench import add_arguments, run
from benchmarks.quality.comparison import Suite
from benchmarks.quality.suites import SUITES

Suites = Mapping[str, Callable[[], Suite]]


def argument_parser(
    suites: Suites = SUITES,
    module: str = "benchmarks.quality",
    documentation: str | None = __doc__,
) -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE SUITE`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=(documentation or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(module=module, stressed=False)
    parser.add_argument("suite", choices=tuple(suites), help="the comparisons")
    add_arguments(parser)
    parser.add_argument(
        "--no-fake", action="store_true", help="leave out what papers simulate in one pass"
    )
    parser.add_argument("--only", metavar="WORDS", help="only tables whose title holds these words")
    return parser


def run_suite(parser: argparse.ArgumentParser, suites: Suites, argv: Sequence[str] | None) -> None:
    """Measure the suite that the command names. Errors of the input are one line, exit code 2."""
    options = parser.parse_args(argv)
    try:
        run(suites[options.suite](), options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    print(options.json)


def main(argv: Sequence[str] | None = None) -> None:
    run_suite(argument_parser(), SUITES, argv)


if __name__ == "__main__":
    main()
