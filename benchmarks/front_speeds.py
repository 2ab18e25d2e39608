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
LLAMA_CPP = ("llama.cpp, f16", "llama.cpp, f16, two products")
CACHES = (
    *("dense", "kivi:bits=2", "kivi:bits=4", "waterfill:bits=2.5"),
    "waterfill:bits=2.25,preset=rotated",
)
IN_EIGENBASIS = "waterfill:bits=2.5,key_basis=eigen"

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
        "H200, us": (gpu := _gpu()),
    }
    lines = (
        (
            name if name in LLAMA_CPP else f"`{name}`",
            *(cells.get(name, "") for cells in columns.values()),
        )
        for name in (*CACHES, *LLAMA_CPP)
    )
    pages = {file: f"({results}{file.stem}.md)" for file in (STEP, SHORT_AND_LONG, REQUEST, GPU)}
    note = (
        "Compare within a column. SmolLM2, whose `dense` cache is float32 on a CPU (bfloat16 takes"
        " half of it), `waterfill` with the widths of its template: a decode step on two cores"
        f" after [6K tokens]{pages[STEP]} and, on another machine, after [1K and"
        f" 16K]{pages[SHORT_AND_LONG]}{_without_blocks()}; a [request]{pages[REQUEST]} of 4,096"
        f" tokens on one core, from one GGUF file. H200: [attention]{pages[GPU]} over 16 x 32K"
        " tokens in one layer of Llama-3.1-8B, where `dense` is cuDNN in bfloat16. No GPU has run"
        f" `preset=rotated`; `{IN_EIGENBASIS}`, which has the same basis of keys, takes"
        f" {gpu[IN_EIGENBASIS]} us."
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
    """Return the columns of a request, with both of llama.cpp's ways with f16."""
    rows = {
        row.way if row.system == "kvq" else f"{row.system}, {row.way}": row
        for row in RequestReport.read(REQUEST).rows
        if (row.model, row.prompt, row.cores) == ("smollm2", 4096, 1) and row.samples_ms
    }
    return {
        "first token, s": {name: f"{row.first_ms / 1e3:.1f}" for name, row in rows.items()},
        "later ones, ms": {name: f"{row.step_ms:.1f}" for name, row in rows.items()},
        "peak, GB": {name: f"{row.peak_bytes / 1e9:.1f}" for name, row in rows.items()},
    }


def _gpu() -> Cells:
    times = {
        (row.candidate, row.arithmetic): f"{1e3 * row.median_ms:.0f}"
        for row in GpuReport.read(GPU).rows
        if row.section == "attention" and (row.shape.batch, row.shape.tokens) == (16, 32768)
    }
    kernels = {cache: us for (cache, arithmetic), us in times.items() if arithmetic == "mosaic"}
    return kernels | {"dense": times["cuDNN bf16", ""]}
