"""The README's table of speeds, from committed results: `python -m benchmarks.results_page`."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Mapping

from benchmarks.cpu.request.report import RequestReport
from benchmarks.cpu.timing import CpuReport
from benchmarks.gpu.report import GpuReport
from benchmarks.markdown import table
from benchmarks.report_file import RESULTS

BEGIN = "<!-- speeds, made by python -m benchmarks.results_page -->"
STEP = RESULTS / "decode_step_6k_smollm2_cpu.json"
SHORT_AND_LONG = RESULTS / "decode_step_smollm2_xeon_cpu.json"
REQUEST = RESULTS / "request_cpu.json"
GPU = RESULTS / "kernels_h200.json"
LLAMA_CPP = "llama.cpp, f16"
ROTATED = "waterfill:bits=2.25,preset=rotated"
ON_GPU = "waterfill:bits=2.5,key_basis=eigen"  # stands in for ROTATED, which no GPU has run
CACHES = ("dense", "kivi:bits=2", "kivi:bits=4", "waterfill:bits=2.5", ROTATED, LLAMA_CPP)

Cells = Mapping[str, str]  # by cache


def section(results: str) -> str:
    """Render the table and the paragraph below it. `results` leads from the page to
    benchmarks/results."""
    columns: dict[str, Cells] = {
        "cache at 6K, MiB": _mebibytes(),
        "step at 6K, ms": _steps(STEP, 6144),
        "at 1K, ms": _steps(SHORT_AND_LONG, 1024),
        "at 16K, ms": _steps(SHORT_AND_LONG, 16384),
        **_request(),
        "H200, us": _gpu(),
    }
    lines = (
        (
            cache if cache == LLAMA_CPP else f"`{cache}`",
            *(cells.get(cache, "") for cells in columns.values()),
        )
        for cache in CACHES
    )
    pages = {file: f"({results}{file.stem}.md)" for file in (STEP, SHORT_AND_LONG, REQUEST, GPU)}
    note = (
        "Compare within a column. SmolLM2, whose `dense` cache is float32 on a CPU: a decode step"
        f" on two cores after [6K tokens]{pages[STEP]} and, on another machine, after [1K and"
        f" 16K]{pages[SHORT_AND_LONG]}{_without_blocks()}; a [request]{pages[REQUEST]} of 4,096"
        f" tokens on one core, from one GGUF file. H200: [attention]{pages[GPU]} over 16 x 32K"
        " tokens in one layer of Llama-3.1-8B, where `dense` is cuDNN in bfloat16 and the last"
        f" `waterfill` is `{ON_GPU}`."
    )
    filled = textwrap.fill(note, 100, break_long_words=False, break_on_hyphens=False)
    return f"{table(('cache', *columns), lines)}\n\n{filled}"


def _steps(file: pathlib.Path, tokens: int) -> Cells:
    report = CpuReport.read(file)
    return {
        row.implementation: f"{report.step_ms(row):.1f}"
        for row in report.rows
        if row.shape.tokens == tokens
    }


def _without_blocks() -> str:
    """Return a remark if a cache's step leaves out its share of quantizing blocks."""
    reports = map(CpuReport.read, (STEP, SHORT_AND_LONG))
    blocks = {c.block for r in reports for c in map(r.cycle, r.rows) if c.left_out}
    return f", steps that quantize a block (one in {max(blocks)}) left out" if blocks else ""


def _mebibytes() -> Cells:
    rows = CpuReport.read(STEP).rows
    return {row.implementation: f"{row.cache_bytes / 2**20:.0f}" for row in rows}


def _request() -> dict[str, Cells]:
    """Return the columns of a request. Of llama.cpp's ways with f16 the one with the faster step is
    shown."""
    rows = {
        (row.system, row.way): row
        for row in RequestReport.read(REQUEST).rows
        if (row.model, row.prompt, row.cores) == ("smollm2", 4096, 1) and row.samples_ms
    }
    shown = {way: row for (system, way), row in rows.items() if system == "kvq"}
    ways = (rows["llama.cpp", way] for way in ("f16", "f16, two products"))
    shown[LLAMA_CPP] = min(ways, key=lambda row: row.step_ms)
    return {
        "first token, s": {way: f"{row.first_ms / 1e3:.1f}" for way, row in shown.items()},
        "later ones, ms": {way: f"{row.step_ms:.1f}" for way, row in shown.items()},
        "peak, GB": {way: f"{row.peak_bytes / 1e9:.1f}" for way, row in shown.items()},
    }


def _gpu() -> Cells:
    times = {
        (row.candidate, row.arithmetic): f"{1e3 * row.median_ms:.0f}"
        for row in GpuReport.read(GPU).rows
        if row.section == "attention" and (row.shape.batch, row.shape.tokens) == (16, 32768)
    }
    shown = {cache: times[cache, "mosaic"] for cache in CACHES if (cache, "mosaic") in times}
    return shown | {"dense": times["cuDNN bf16", ""], ROTATED: times[ON_GPU, "mosaic"]}
