"""Make the pages of benchmarks/results from the JSON files there, README.md, their index, both
tables and the picture in the project's README, and the KL that `kvq memory --budget` shows.

Run it after a benchmark. Never edit its output by hand.
"""

from __future__ import annotations

import argparse
import fnmatch
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import claims, front_speeds, measured_caches, mesh, serving_report, serving_start
from benchmarks.cpu import page as cpu_page
from benchmarks.cpu.request import report as request
from benchmarks.cpu.timing import CpuReport
from benchmarks.faults import cost
from benchmarks.faults import report as faults
from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.report import GpuReport
from benchmarks.hosts import report as hosts
from benchmarks.machine_code import launches
from benchmarks.machine_code import report as machine_code
from benchmarks.markdown import replaced, table
from benchmarks.protocol import equal_bytes, front_page, pairs
from benchmarks.protocol import page as protocol_page
from benchmarks.protocol.report import ProtocolReport
from benchmarks.report_file import RESULTS, Report
from kvq_jax.files import whole

INDEX = "README.md"
INTRODUCTION = """\
# Results

A page for each JSON file of this folder, made by `python -m benchmarks.results_page`; the files
hold every sample. A page begins with the command that measured it. Studies of single papers:
[laboratory](../../laboratory/results/README.md). [Every comparative sentence](claims.md) of the
README and of the papers' page, with its intervals."""
NO_GPU = """\
**No kernel was run on a GPU yet.** What is said of kernels here is counted in machine code that was
compiled without one. Times are of CPUs."""
HEAD = ("page", "measures", "command", "numbers", "made")


class Kind(NamedTuple):
    """A reader and a renderer for the files whose stem matches a pattern, and what was measured."""

    stems: str
    report: type[Report]
    page: Callable[[Any, pathlib.Path], str]
    subject: str | Callable[[Any], str]


KINDS = (
    Kind(
        "instructions*",
        machine_code.Instructions,
        machine_code.page,
        "machine instructions for each cached element",
    ),
    Kind(
        "launches*",
        launches.LaunchReport,
        launches.page,
        "what a layer of a decode step launches on a GPU, with estimated times",
    ),
    Kind(
        "protocol_*",
        ProtocolReport,
        protocol_page.page,
        "KL, perplexity and size in equal windows, after a prompt and decoded",
    ),
    Kind(
        "kernels_*",
        GpuReport,
        gpu_page.kernels_page,
        "time, bandwidth and error of kernels, the papers' tables",
    ),
    Kind("step_*", GpuReport, gpu_page.step_page, "time and bandwidth of whole decode steps"),
    Kind(
        "parity_*",
        GpuReport,
        gpu_page.parity_page,
        "errors of kernels and of many small steps on a GPU",
    ),
    Kind(
        "serving_start*",
        serving_start.StartReport,
        serving_start.page,
        "seconds from an empty machine to the first streamed token",
    ),
    Kind(
        "serving*",
        serving_report.ServingReport,
        serving_report.page,
        (
            "requests a second and time to first token through slots, sequences in equal memory,"
            " prefixes that come back"
        ),
    ),
    Kind(
        "hosts*",
        hosts.HostsReport,
        hosts.page,
        "adapters: lines of code, tokens, errors, bytes and times against hosts' own caches",
    ),
    Kind(
        "mesh*",
        mesh.MeshReport,
        mesh.page,
        "decode steps on virtual devices, and what their collectives cost",
    ),
    Kind(
        "verification*",
        cost.CostReport,
        cost.page,
        "CPU time of verifying live memory, against a decode step",
    ),
    Kind(
        "faults*",
        faults.FaultReport,
        faults.page,
        "injected faults: detected, recovered, wrong answers, crashes and hangs",
    ),
    Kind(
        "request*",
        request.RequestReport,
        request.page,
        "time to first token, ms a token and memory, against llama.cpp and transformers",
    ),
    Kind("*", CpuReport, cpu_page.page, cpu_page.subject),
)


Entry = tuple[pathlib.Path, Kind, Report]


def read_reports(folder: pathlib.Path, kinds: Sequence[Kind]) -> list[Entry]:
    """Return each JSON file of a kind, sorted by name, with its kind and its content."""
    matched = (
        (file, next((kind for kind in kinds if fnmatch.fnmatch(file.stem, kind.stems)), None))
        for file in sorted(folder.glob("*.json"))
    )
    return [(file, kind, kind.report.read(file)) for file, kind in matched if kind]


def render(folder: pathlib.Path) -> dict[str, str]:
    """Return the text of each page by its file's name. Raises ValueError if there are no
    reports."""
    reports = read_reports(folder, KINDS)
    if not reports:
        raise ValueError(
            f"no results in {folder}: run `python -m benchmarks.cpu.attention --json"
            f" {folder}/attention.json` first"
        )
    pages = {f"{file.stem}.md": kind.page(report, file) for file, kind, report in reports}
    index = [
        INTRODUCTION,
        *([] if any(kind.stems == "kernels_*" for _, kind, _ in reports) else [NO_GPU]),
    ]
    protocol = front_page.report_for_readme(folder / front_page.FILE.name)
    if protocol:
        other = front_page.other_report(folder / front_page.OTHER_FILE.name)
        index.append(front_page.section(protocol, "", other))
    index += ["## Pages", table(HEAD, (index_line(*entry) for entry in reports))]
    made = {name: text + "\n" for name, text in ({INDEX: "\n\n".join(index)} | pages).items()}
    if folder != RESULTS:
        return made
    return made | {page.FILE.name: page.contents() for page in (claims, equal_bytes, pairs)}


def index_line(file: pathlib.Path, kind: Kind, report: Report) -> tuple[str, ...]:
    origin = f"{report.date}{report.device and f', {report.device}'}"
    return (
        f"[{report.title}]({file.stem}.md)",
        kind.subject if isinstance(kind.subject, str) else kind.subject(report),
        f"`{report.command}`",
        f"[{file.name}]({file.name})",
        origin,
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
    if args.folder == RESULTS:
        _write_readme()
        pages = render(args.folder)  # claims are of the README as it is now
    for name, text in pages.items():
        whole.write(args.folder / name, text)
        print(args.folder / name)


def _write_readme() -> None:
    """Write the README's tables, the pictures, and the KL that `kvq memory` shows."""
    whole.write(measured_caches.FILE, measured_caches.contents(measured_caches.read()))
    page = front_page.PAGE.read_text(encoding="utf-8")
    page = replaced(page, front_speeds.BEGIN, front_speeds.section("benchmarks/results/"))
    if protocol := front_page.report_for_readme():
        section = front_page.section(protocol, "benchmarks/results/", front_page.other_report())
        page = replaced(page, front_page.BEGIN, section)
    whole.write(front_page.PAGE, page)
    print(front_page.PAGE, measured_caches.FILE, sep="\n")
    for file in filter(pathlib.Path.is_file, front_page.SOURCES):
        picture = front_page.picture_of(file)
        whole.write(picture, front_page.picture(ProtocolReport.read(file)))
        print(picture)


if __name__ == "__main__":
    main()
