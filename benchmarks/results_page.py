"""Makes the pages of benchmarks/results from the JSON files there: one for each, and README.md,
their index; and the table of caches in the project's README.

Run it after a benchmark; never edit its output by hand.
"""

from __future__ import annotations

import argparse
import fnmatch
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import drafts, mesh, readme_table, serving, serving_soak, serving_start, soak
from benchmarks.cpu import generation, roofline
from benchmarks.cpu import page as cpu_page
from benchmarks.cpu.timing import CpuReport
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.report import GpuReport
from benchmarks.machine_code import launches
from benchmarks.machine_code import report as machine_code
from benchmarks.markdown import table
from benchmarks.quality import (
    joint_weights,
    key_bias,
    layer_similarity,
    long_context_report,
    outlier_channels,
    squat_subspace_report,
)
from benchmarks.quality import page as quality_page
from benchmarks.quality.report import QualityReport
from benchmarks.report_file import RESULTS, Report
from kvq_jax.files import whole

INDEX = "README.md"
INTRODUCTION = """\
# Results

A page for each JSON file of this folder, made by `python -m benchmarks.results_page`; the files
hold every sample. A page begins with the command that measured it."""
NO_GPU = """\
**No kernel was run on a GPU yet.** What is said of kernels here is counted in machine code that
was compiled without one. Times are of CPUs."""


class Kind(NamedTuple):
    """The files whose stem matches a pattern: how they are read and rendered, and what they
    measure."""

    stems: str
    report: type[Report]
    page: Callable[[Any, pathlib.Path], str]
    subject: Callable[[Any], str]


def _always(subject: str) -> Callable[[Any], str]:
    return lambda report: subject


KINDS = (
    Kind(
        "instructions*",
        machine_code.Instructions,
        machine_code.page,
        _always("machine instructions for each cached element"),
    ),
    Kind(
        "launches*",
        launches.LaunchReport,
        launches.page,
        _always("what a layer of a decode step launches on a GPU, with estimated times"),
    ),
    Kind(
        "quality_*",
        QualityReport,
        quality_page.page,
        _always("perplexity, KL and size of caches, decoded through the cache after a prompt"),
    ),
    Kind(
        "joint_weights*",
        joint_weights.JointReport,
        joint_weights.page,
        _always("perplexity with quantized weights, caches, and both"),
    ),
    Kind(
        "key_bias*",
        key_bias.BiasReport,
        key_bias.page,
        _always("KL of caches of a model with a large key bias, and without the bias"),
    ),
    Kind(
        "long_context*",
        long_context_report.LongContextReport,
        long_context_report.page,
        _always("accuracy of answers about long texts, decoded through the cache"),
    ),
    Kind(
        "squat_subspace*",
        squat_subspace_report.SubspaceReport,
        squat_subspace_report.page,
        _always("how well a prompt's queries tell where later ones lie"),
    ),
    Kind(
        "layer_similarity*",
        layer_similarity.SimilarityReport,
        layer_similarity.page,
        _always("how alike successive layers' inputs, keys and values are"),
    ),
    Kind(
        "outlier_channels*",
        outlier_channels.OutlierChannelsReport,
        outlier_channels.page,
        _always("how often weights alone name the channel of key outliers"),
    ),
    Kind(
        "kernels_*",
        GpuReport,
        gpu_page.kernels_page,
        _always("time, bandwidth and error of kernels, the papers' tables"),
    ),
    Kind(
        "step_*", GpuReport, gpu_page.step_page, _always("time and bandwidth of whole decode steps")
    ),
    Kind(
        "parity_*",
        GpuReport,
        gpu_page.parity_page,
        _always("errors of kernels and of many small steps on a GPU"),
    ),
    Kind(
        "soak*",
        soak.SoakReport,
        soak.page,
        _always("memory, and results against a new cache's, over very many decode steps"),
    ),
    Kind(
        "serving_soak*",
        serving_soak.ServingSoakReport,
        serving_soak.page,
        _always(
            "memory, compilations, and answers against those given alone, over very many requests"
        ),
    ),
    Kind(
        "serving_start*",
        serving_start.StartReport,
        serving_start.page,
        _always("seconds from an empty machine to the first streamed token"),
    ),
    Kind(
        "serving*",
        serving.ServingReport,
        serving.page,
        _always(
            "requests a second and time to first token through slots, sequences in equal memory,"
            " prefixes that come back"
        ),
    ),
    Kind(
        "drafts*",
        drafts.DraftReport,
        drafts.page,
        _always("greedy decoding with drafts looked up in the text, and without"),
    ),
    Kind(
        "mesh*",
        mesh.MeshReport,
        mesh.page,
        _always("decode steps on virtual devices, and what their collectives cost"),
    ),
    Kind(
        "roofline*",
        roofline.RooflineReport,
        roofline.page,
        _always("the CPU kernel's time beside memory's and arithmetic's, instructions"),
    ),
    Kind(
        "generation*",
        generation.GenerationReport,
        generation.page,
        _always("tokens a second with kvq's caches and with transformers'"),
    ),
    Kind("*", CpuReport, cpu_page.page, cpu_page.subject),
)


def render(folder: pathlib.Path) -> dict[str, str]:
    """Return the text of each page by its file's name. ValueError where the folder has no
    reports."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(
            f"no results in {folder}: run `python -m benchmarks.cpu.attention --json"
            f" {folder}/attention.json` first"
        )
    reports = [(file, kind, kind.report.read(file)) for file in files for kind in [kind_of(file)]]
    pages = {f"{file.stem}.md": kind.page(report, file) for file, kind, report in reports}
    index = [
        INTRODUCTION,
        *([] if any(kind.stems == "kernels_*" for _, kind, _ in reports) else [NO_GPU]),
    ]
    if all((folder / f"{name}.json").exists() for name in readme_table.FILES):
        index.append(readme_table.section(readme_table.read(folder), ""))
    index += [
        "## Pages",
        table(
            ("page", "measures", "command", "numbers", "made"), (_line(*entry) for entry in reports)
        ),
    ]
    return {name: text + "\n" for name, text in ({INDEX: "\n\n".join(index)} | pages).items()}


def kind_of(file: pathlib.Path) -> Kind:
    return next(kind for kind in KINDS if fnmatch.fnmatch(file.stem, kind.stems))


def _line(file: pathlib.Path, kind: Kind, report: Report) -> tuple[str, ...]:
    made = f"{report.date}{report.device and f', {report.device}'}"
    return (
        f"[{report.title}]({file.stem}.md)",
        kind.subject(report),
        f"`{report.command}`",
        f"[{file.name}]({file.name})",
        made,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=RESULTS,
        help="where the JSON files are (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    try:
        pages = render(args.folder)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    for name, text in pages.items():
        whole.write(args.folder / name, text)
        print(args.folder / name)
    if args.folder == RESULTS:
        table_of_caches = readme_table.section(readme_table.read(), "benchmarks/results/")
        page = readme_table.README.read_text(encoding="utf-8")
        whole.write(readme_table.README, readme_table.replaced(page, table_of_caches))
        print(readme_table.README)


if __name__ == "__main__":
    main()
