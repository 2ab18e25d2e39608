"""Run a study and write its numbers: `python -m laboratory.run STUDY --json FILE`.

The file has the command, the date, the device, the versions of JAX and Python, the commit of the
sources, and the study's result as plain JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
from collections.abc import Sequence

from benchmarks.model_names import add_model
from benchmarks.report_file import arguments, header
from kvq_jax.files import whole

STUDIES = ("layer_similarity", "outliers", "squat_subspace")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.run", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="study", required=True, metavar="STUDY")
    for name in STUDIES:
        study = importlib.import_module(f"laboratory.studies.{name}")
        command = commands.add_parser(
            name,
            help=(study.__doc__ or "").partition("\n")[0],
            description=study.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True)
        add_model(command)
        study.add_arguments(command)
        command.set_defaults(run=study.run)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        result = options.run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")
    # files by their names, which tell nothing of a machine
    words = (pathlib.Path(word).name if "/" in word else word for word in arguments(argv))
    report = {"title": options.study, **header(["laboratory.run", *words]), "result": result}
    whole.write(options.json, json.dumps(report, indent=1) + "\n")
    print(options.json)


if __name__ == "__main__":
    main()
