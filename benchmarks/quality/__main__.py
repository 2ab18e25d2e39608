"""Measure a small model's predictions through the real cache: the papers' tables and others, on one text.

Every cache that needs a calibration gets one, from samples of another text. Papers' tables run on two more variants of the model as
well, with the same exact outputs and outliers in keys or in values. Numbers in benchmarks/results come from the JSON.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from benchmarks.quality.bench import run
from benchmarks.quality.suites import SUITES
from kvq_models import EMBEDDED


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("suite", choices=tuple(SUITES), help="the comparisons")
    parser.add_argument("--model", metavar="DIR", type=pathlib.Path, default=EMBEDDED, help="a model (default: the embedded one)")
    parser.add_argument("--text", metavar="FILE", type=pathlib.Path, required=True, help="the text that is scored")
    parser.add_argument("--calibration-text", metavar="FILE", type=pathlib.Path, required=True, help="the calibration text")
    parser.add_argument("--other-calibration-text", metavar="FILE", type=pathlib.Path, required=True, help="another such text")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True, help="where the rows go")
    parser.add_argument("--windows", type=int, default=16, help="windows of the text")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a window that are a prompt, and not scored")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a calibration sample")
    parser.add_argument("--only", metavar="WORDS", help="only tables whose title holds these words")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        report = run(SUITES[options.suite](), options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    report.write(options.json)
    print(options.json)


if __name__ == "__main__":
    main()
