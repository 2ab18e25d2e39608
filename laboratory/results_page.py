"""Make the pages of laboratory/results from the JSON files there, and README.md, their index.

The pages of studies in `KEPT` stay as they are: `laboratory.run` measures these again, as JSON
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import pathlib
from collections.abc import Sequence

from benchmarks.cpu import page as cpu_page
from benchmarks.cpu.timing import CpuReport
from benchmarks.markdown import table
from benchmarks.results_page import HEAD, Kind, index_line, read_reports
from kvq_jax.files import whole
from laboratory import serving_soak, soak
from laboratory.quality import joint_weights, key_bias, long_context_report, outlier_channels
from laboratory.quality import page as quality_page
from laboratory.quality.report import QualityReport
from laboratory.quality.variants import WORDS

RESULTS = pathlib.Path(__file__).parent / "results"
INTRODUCTION = """\
# Results of studies

A page for each JSON file of this folder. A page begins with the command that measures its numbers.
Programs that lay in `benchmarks` at the commit of a page have the names that they have now; the
JSON file has the command as it was typed."""
# the words of recorded commands, and the programs and the folder that took their place
MOVED = {
    "benchmarks.quality.layer_similarity": "laboratory.run layer_similarity",
    "benchmarks.quality.squat_subspace": "laboratory.run squat_subspace",
    "benchmarks.quality": "laboratory.quality",
    "benchmarks.serving_soak": "laboratory.serving_soak",
    "benchmarks.soak": "laboratory.soak",
    "benchmarks.cpu.squat_prefill": "laboratory.squat_prefill",
    "benchmarks/results": "laboratory/results",
    " --predicted 0": "",  # an option of SQuat's study that is gone, and that asked for nothing
}
KEPT = {
    "squat_subspace*": "how well a prompt's queries tell where later ones lie",
    "layer_similarity*": "how alike successive layers' inputs, keys and values are",
}
KINDS = (
    Kind(
        "quality_*",
        QualityReport,
        functools.partial(quality_page.page, variants=WORDS),
        "perplexity, KL and size of caches, read through the real cache",
    ),
    Kind(
        "joint_weights*",
        joint_weights.JointReport,
        joint_weights.page,
        "perplexity with quantized weights, caches, and both",
    ),
    Kind(
        "key_bias*",
        key_bias.BiasReport,
        key_bias.page,
        "KL of caches of a model with a large key bias, and without the bias",
    ),
    Kind(
        "long_context*",
        long_context_report.LongContextReport,
        long_context_report.page,
        "accuracy of answers about long texts, read through the real cache",
    ),
    Kind(
        "outlier_channels*",
        outlier_channels.OutlierChannelsReport,
        outlier_channels.page,
        "how often weights alone name the channel of key outliers",
    ),
    Kind(
        "soak*",
        soak.SoakReport,
        soak.page,
        "memory, and results against a new cache's, over very many decode steps",
    ),
    Kind(
        "serving_soak*",
        serving_soak.ServingSoakReport,
        serving_soak.page,
        "memory, compilations, and answers against those given alone, over very many requests",
    ),
    Kind("*_cpu", CpuReport, cpu_page.page, cpu_page.subject),
)


def render(folder: pathlib.Path) -> dict[str, str]:
    """Return the text of each page by its file's name, without the pages of `KEPT`."""
    reports = {
        file.stem: (file, kind, dataclasses.replace(report, command=current(report.command)))
        for file, kind, report in read_reports(folder, KINDS)
    }
    pages = {
        f"{stem}.md": kind.page(report, file) for stem, (file, kind, report) in reports.items()
    }
    lines = []
    for file in sorted(folder.glob("*.json")):
        if file.stem in reports:
            lines.append(index_line(*reports[file.stem]))
        elif subject := kept_subject(file):
            lines.append(_kept_line(file, subject))
    index = "\n\n".join((INTRODUCTION, table(HEAD, lines)))
    return {name: text + "\n" for name, text in ({"README.md": index} | pages).items()}


def current(command: str) -> str:
    """Return a recorded command with the names that its program and its folder have now."""
    for before, now in MOVED.items():
        command = command.replace(before, now)
    return command


def kept_subject(file: pathlib.Path) -> str:
    return next((text for stems, text in KEPT.items() if fnmatch.fnmatch(file.stem, stems)), "")


def _kept_line(file: pathlib.Path, subject: str) -> tuple[str, ...]:
    header = json.loads(file.read_text(encoding="utf-8"))
    return (
        f"[{header['title']}]({file.stem}.md)",
        subject,
        f"`{current(header['command'])}`",
        f"[{file.name}]({file.name})",
        f"{header['date']}, {header['device']}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m laboratory.results_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=RESULTS,
        help="folder of the JSON files (default: %(default)s)",
    )
    folder = parser.parse_args(argv).folder
    for name, text in render(folder).items():
        whole.write(folder / name, text)
        print(folder / name)


if __name__ == "__main__":
    main()
