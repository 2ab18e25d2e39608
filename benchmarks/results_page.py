"""Makes benchmarks/results/README.md from the JSON files beside it. Run it after a benchmark; never edit its output by hand."""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Sequence

from benchmarks.cpu.timing import Report, Row
from benchmarks.gpu import paper_tables
from benchmarks.gpu.rows import KernelRow, TimingReport
from benchmarks.machine_code.report import HEADER as COUNTS_HEADER
from benchmarks.machine_code.report import Instructions
from benchmarks.markdown import table
from benchmarks.quality.key_bias import BiasReport, BiasRow
from benchmarks.quality.page import quality_section
from benchmarks.quality.report import QualityReport
from benchmarks.quality.squat_subspace import LAMS, SCORE_RANKS, SubspaceReport
from pallas_kernels.launch import DEFAULT_ARITHMETIC

RESULTS = pathlib.Path(__file__).parent / "results"
HEADER = ("tokens", "implementation", "median ms", "best ms", "ratio", "cache MB", "temp MB", "peak MB", "error")
KERNEL_HEADER = ("candidate", "median us", "best us", "no tokens us", "MB", "GB/s", "of copy", "time / best bf16", "error", "remarks")
BIAS_HEADER = (
    "cache",
    "spec",
    "what shares a scale",
    "KL, unread: no bias",
    "bias",
    "subtracted",
    "KL, read: no bias",
    "bias",
    "subtracted",
)
STEP_HEADER = ("cache", "median ms", "best ms", "tokens/s", "GB", "of copy", "time / best bf16", "error", "remarks")
INTRODUCTION = """\
# Results

Made from the JSON files in this folder by `python -m benchmarks.results_page`; every sample is in them. Cache MB is what the cache
(or K and V) occupies, temp what a compiled step needs beside its arguments, peak all together, by XLA's account; 1 MB is 10^6 bytes.
Error is the largest relative error of an output row against the reference on the same codes.
"""
NO_GPU = """\
**No kernel was run on a GPU yet.** What is said of kernels here is counted in machine code that was compiled without one. Times are of
CPUs.
"""


def report_section(report: Report, name: str) -> str:
    """One report: where and when, then a table for each batch size and head dim."""
    loads = f"{min(report.load):g} to {max(report.load):g}"
    parts = [
        f"## {report.title}",
        f"`{report.command}` on {report.date}: {report.cpu}, {report.cores} cores, device {report.device}; JAX {report.jax_version}, "
        f"Python {report.python_version}. Load average of the machine meanwhile: {loads}. Baseline: {report.baseline}. "
        "Implementations of one shape are timed in turn; a ratio is the median over rounds of time / baseline's time in the same round. "
        f"Raw samples: [{name}]({name}).",
    ]
    rows = sorted(report.rows, key=_section)
    for (head_dim, batch, kv_heads, group), found in itertools.groupby(rows, key=_section):
        parts.append(f"### Head dim {head_dim}, batch {batch}, {kv_heads} KV heads with {group} query heads each")
        parts.append(table(HEADER, map(_line, found)))
    return "\n\n".join(parts)


def instructions_section(counts: Instructions, name: str) -> str:
    """What the kernels' main loops cost, by target."""
    return "\n\n".join(
        (
            "## Instructions of the GPU kernels",
            f"`{counts.command}` on {counts.date}; JAX {counts.jax_version}, ptxas {counts.ptxas_version}. Counted in the machine code "
            "of each kernel's main loop, compiled without a GPU: what the instructions allow, not how fast a kernel runs. Per element is "
            f"per cached element, K or V. Raw counts: [{name}]({name}).",
            table(COUNTS_HEADER, (row.line() for row in counts.rows)),
        )
    )


def kernels_section(report: TimingReport, name: str) -> str:
    """Times of kernels: a table for each shape, then the papers' tables."""
    parts = [
        *_device_head(report, name),
        "Times are the host's clock around a compiled loop of many calls, over their number. A call is several launches: where those take "
        'longer than the work, they are what is timed. "No tokens" is the same program over empty rows, so its launches, and rows where it '
        'takes more than half of the time say "mostly launches"; other code has no such input, but as much is to be suspected of its rows '
        "beside them. Candidates are timed one after another, not in turn; time / best bf16 divides two medians. GB/s and the share of the "
        "copy bandwidth are of the bytes that must be moved: the keys and values that attention reads, packed where they are; what a "
        "product reads and writes, and so does quantizing. An error of - was not measured.",
    ]
    for place, found in _by_shape(report, "attention"):
        parts += [f"### {place}", table(KERNEL_HEADER, (_kernel_line(report, row) for row in found))]
    for paper in paper_tables.tables(report):
        parts += [f"### {paper.title}", paper.note, table(paper.header, paper.lines)]
    others = (row for row in report.rows if row.failure and row.section != "attention")
    if failures := [f"- {row.section}, {row.model}, {row.shape.tokens} tokens, {row.name}: {row.failure}" for row in others]:
        parts += ["### Failures", "\n".join(failures)]
    return "\n\n".join([*parts, *_skipped(report)])


def step_section(report: TimingReport, name: str) -> str:
    """Whole decode steps: a table for each shape."""
    parts = [
        *_device_head(report, name),
        "One step of all layers: attention, MLPs and logits; random weights. GB are what a step must read: the weights and the cache. "
        "Times are the host's clock around a compiled loop of a few steps; candidates are timed one after another, and time / best bf16 "
        "divides two medians. asm and jnp are kernels in either arithmetic; by default decode_step takes "
        f"{DEFAULT_ARITHMETIC}. Error is of the logits, against the same cache read by XLA; - was not measured.",
    ]
    for place, found in _by_shape(report, "step"):
        parts += [f"### {place}", table(STEP_HEADER, (_step_line(report, row) for row in found))]
    return "\n\n".join([*parts, *_skipped(report)])


def subspace_section(report: SubspaceReport, name: str) -> str:
    """Where later queries lie, and what SQuat makes of it."""
    sources = dict.fromkeys(row.source for row in report.deviations)
    found = [(f"{s}, {'after' if rope else 'before'} RoPE", report.deviation(s, rope)) for rope in (False, True) for s in sources]
    parts = [
        f"## {report.title}",
        f"`{report.command}` on {report.date}; JAX {report.jax_version}. Model: {report.model}, {report.prompt_tokens} tokens of "
        f"{report.text}, then {report.response_tokens} that it wrote without quantization. Another part is of the same text, another "
        f"text is {report.other_text}. All numbers are means of the layers; those of each layer: [{name}]({name}).",
        f"![deviations by rank, errors by lam]({name.removesuffix('.json')}.png)",
        "### Deviation of the response's queries from the subspace of other queries, by rank (the paper's Figure 2, left)",
        table(("queries that span it", *map(str, report.ranks)), ((label, *(f"{v:.2f}" for v in values)) for label, values in found)),
        "### Error of q . k for the response's queries and the prompt's keys, 2 bits, relative to KIVI's (Figure 2, right)",
        "Squat's scores are of queries and keys after RoPE, squat_pre's of keys that were coded before it and then rotated. The last "
        "table is of real caches without exact windows: nats of the tokens that follow prompts of the same length in the text.",
    ]
    for setting in dict.fromkeys(row.setting for row in report.errors):
        lines = ((str(rank), *(f"{report.ratio(setting, rank, lam):.2f}" for lam in LAMS)) for rank in SCORE_RANKS)
        parts.append(table((f"{setting}: rank", *(f"lam {lam:g}" for lam in LAMS)), lines))
    predicted = ((f"`{row.cache}`", f"{row.nats:.3f}") for row in report.predictions)
    parts.append(table(("cache", f"nats of {report.predictions[0].tokens} tokens"), predicted))
    return "\n\n".join(parts)


def key_bias_section(report: BiasReport, name: str) -> str:
    """What a key bias does to caches, and what is left of that when it is subtracted: two variants of the model, side by side."""
    exact = {variant: f"{perplexity:.3f}" for variant, perplexity in report.perplexities.items()}
    return "\n\n".join(
        (
            f"## {report.title}",
            f"`{report.command}` on {report.date}; JAX {report.jax_version}. Model: {report.model}, float32; {report.windows} windows of "
            f"{report.window} tokens of {report.text}, the first {report.prompt} of each a prompt and not scored. KL is from the exact "
            f"outputs of the same model. KVQuant is calibrated on {report.calibration_text}. Raw numbers: [{name}]({name}).",
            f"Unread: `kvq stress --key-bias {report.key_bias:g}`, heads of twice the width with constants that no query reads; "
            f"exact perplexity {exact['plain']} without them and {exact['wide']} with them. Read: {report.key_bias:g} in the slowest RoPE "
            f"pairs of every head, which queries read; exact perplexity {exact['slow']}. Refused: the cache holds no keys, and adds their "
            "bias when it rebuilds them. SQuat's two numbers without a bias differ because its lam weighs squares of queries, which heads "
            "of twice the width double.",
            table(BIAS_HEADER, map(_bias_line, report.rows)),
        )
    )


def _bias_line(row: BiasRow) -> tuple[str, ...]:
    found = (kl for v in (row.wide, row.slow) for kl in (v.plain, v.biased, v.subtracted))
    return row.label, f"`{row.cache}`", row.shares, *("refused" if quality is None else f"{quality.kl:.5f}" for quality in found)


def _device_head(report: TimingReport, name: str) -> list[str]:
    copy, read = (report.median_rate(kind) for kind in ("copy", "read"))
    bandwidth = "not measured" if copy is None or read is None else f"{copy / 1e12:.2f} TB/s (reading alone: {read / 1e12:.2f} TB/s)"
    return [
        f"## {report.title}",
        f"`{report.command}` on {report.date}: {report.device}; JAX {report.jax_version}, Python {report.python_version}. Copy bandwidth, "
        f"bytes read and written: {bandwidth}. Raw samples: [{name}]({name}).",
    ]


def _skipped(report: TimingReport) -> list[str]:
    return [f"Left out for lack of time: {'; '.join(report.skipped)}."] if report.skipped else []


def _by_shape(report: TimingReport, section: str) -> list[tuple[str, list[KernelRow]]]:
    """A section's rows by shape, in the order of models and sizes."""
    chosen = (row for row in report.rows if row.section == section)
    ordered = sorted(chosen, key=lambda row: (row.model, row.shape.batch, row.shape.tokens))
    return [
        (f"{model}, batch {shape.batch}, {shape.tokens} tokens", list(found))
        for (model, shape), found in itertools.groupby(ordered, key=lambda row: (row.model, row.shape))
    ]


def _step_line(report: TimingReport, row: KernelRow) -> tuple[str, ...]:
    name, *_, share, ratio, error, remarks = _kernel_line(report, row)
    if not row.samples_ms:
        return name, *[""] * 7, remarks
    times = f"{row.median_ms:.3f}", f"{min(row.samples_ms):.3f}", f"{1e3 * row.shape.batch / row.median_ms:.0f}"
    return name, *times, f"{row.moved_bytes / 1e9:.2f}", share, ratio, error, remarks


def _kernel_line(report: TimingReport, row: KernelRow) -> tuple[str, ...]:
    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None or not row.samples_ms else pattern.format(value)

    remarks = [] if row.cold or not row.samples_ms else ["partly from L2"]
    remarks += ["mostly launches"] if row.mostly_launches else []
    remarks += [text for text in (row.remark, row.failure) if text]
    error = "-" if row.error is None and row.samples_ms and not row.failure else cell(row.error, "{:.1e}")
    return (
        row.name,
        cell(1e3 * row.median_ms, "{:.1f}"),
        cell(1e3 * min(row.samples_ms, default=0), "{:.1f}"),
        cell(None if row.idle_ms is None else 1e3 * row.idle_ms, "{:.1f}"),
        cell(row.moved_bytes / 1e6, "{:.1f}"),
        cell(row.rate / 1e9, "{:.0f}"),
        cell(report.share(row), "{:.0%}"),
        cell(report.ratio(row), "{:.2f}"),
        error,
        "; ".join(remarks),
    )


def section(file: pathlib.Path) -> str:
    """The section of one JSON file, by its name."""
    if file.stem == "instructions":
        return instructions_section(Instructions.read(file), file.name)
    if file.stem.startswith("quality_"):
        return quality_section(QualityReport.read(file), file)
    if file.stem.startswith("key_bias"):
        return key_bias_section(BiasReport.read(file), file.name)
    if file.stem == "squat_subspace":
        return subspace_section(SubspaceReport.read(file), file.name)
    if file.stem.startswith("kernels_"):
        return kernels_section(TimingReport.read(file), file.name)
    if file.stem.startswith("step_"):
        return step_section(TimingReport.read(file), file.name)
    return report_section(Report.read(file), file.name)


def _section(row: Row) -> tuple[int, int, int, int]:
    return row.shape.head_dim, row.shape.batch, row.shape.kv_heads, row.shape.group


def _line(row: Row) -> tuple[str, ...]:
    return (
        str(row.shape.tokens),
        row.implementation,
        f"{row.median_ms:.2f}",
        f"{row.best_ms:.2f}",
        f"{row.ratio:.2f}",
        *(f"{size / 1e6:.2f}" for size in (row.cache_bytes, row.temp_bytes, row.peak_bytes)),
        f"{row.error:.1e}",
    )


def render(folder: pathlib.Path) -> str:
    """The page for a folder of reports. ValueError where the folder has none."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"no results in {folder}: run `python -m benchmarks.cpu.attention --json {folder}/attention.json` first")
    sections = map(section, files)
    introduction = [INTRODUCTION] if any(file.stem.startswith("kernels_") for file in files) else [INTRODUCTION, NO_GPU]
    return "\n\n".join([*map(str.rstrip, introduction), *sections]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results_page", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where the JSON files are (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        page = render(args.folder)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    (args.folder / "README.md").write_text(page, encoding="utf-8")
    print(args.folder / "README.md")


if __name__ == "__main__":
    main()
