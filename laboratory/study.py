"""The command line of studies: a report, and one line for wrong input."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks.model_names import add_model
from benchmarks.report_file import Report


def study_parser(module: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m module`, with --json and --model. Its description is the
    first line of the documentation."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=(documentation or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, required=True, help="where the numbers go"
    )
    add_model(parser)
    return parser


def run_study(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], Report],
) -> None:
    """Write the report of a study. Wrong input is one line, exit code 2."""
    options = parser.parse_args(argv)
    try:
        report = run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    report.write(options.json)
    print(options.json)


def first_tokens(tokenizer: Any, path: pathlib.Path, count: int) -> Int[np.ndarray, " count"]:
    """Return the first tokens of a text. Raises ValueError if it has fewer."""
    ids = np.asarray(tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids, np.int32)
    if len(ids) < count:
        raise ValueError(f"{path.name} must have {count} tokens; it has {len(ids)}")
    return ids[:count]
