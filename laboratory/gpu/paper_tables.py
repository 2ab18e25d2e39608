"""The latency tables of three papers in their own layout, with our times beside theirs.

Wu et al., PolarQuant: Leveraging Polar Transformation for Efficient Key Cache Quantization and
Decoding Acceleration (2025), Table 4.

Hooper et al., KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization
(2024), Table 22.

Tayaranian et al., InnerQ: Hardware-aware Tuning-free Quantization of KV Cache for Large Language
Models (2026): Table 3 (inner grouping against torch.matmul in half precision) and Table 4 (against
outer grouping), milliseconds on an RTX 4090, batch 1, 2 bits, groups of 32, the median of 1000.
Figure 4 (hybrid against symmetric quantization) prints no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.gpu.quantize_candidates import SCHEMES
from benchmarks.gpu.report import GpuReport, KernelRow
from laboratory.gpu.innerq_candidates import EXACT, INNER, OUTER, PAPER_MODELS
from laboratory.gpu.kvquant_candidates import BLOCK, PARTS
from laboratory.gpu.kvquant_candidates import MODEL as KVQUANT_MODEL
from laboratory.gpu.kvquant_candidates import SECTIONS as KVQUANT_SECTIONS
from laboratory.gpu.polarquant_candidates import EXACT as POLAR_EXACT
from laboratory.gpu.polarquant_candidates import KIVI, KVQUANT
from laboratory.gpu.polarquant_candidates import MODEL as POLAR_MODEL
from laboratory.gpu.polarquant_candidates import SECTION as POLAR_SECTION
from laboratory.gpu.polarquant_candidates import SPEC as POLAR_SPEC

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TABLE_3 = {  # model: (torch.matmul, inner), one entry for each length
    "Llama-3.2-1B": (
        (0.024, 0.036, 0.059, 0.106, 0.268, 0.608, 1.226, 2.392, 4.671),
        (0.008, 0.009, 0.014, 0.023, 0.040, 0.074, 0.141, 0.274, 0.541),
    ),
    "Llama-3.1-8B": (
        (0.036, 0.058, 0.106, 0.268, 0.606, 1.226, 2.391, 4.669, 9.390),
        (0.009, 0.014, 0.023, 0.040, 0.074, 0.141, 0.274, 0.541, 1.077),
    ),
    "Llama-2-13B": (
        (0.043, 0.070, 0.145, 0.340, 0.737, 1.517, 2.920, 5.838, 11.725),
        (0.012, 0.017, 0.027, 0.048, 0.090, 0.175, 0.341, 0.677, 1.343),
    ),
}
TABLE_4 = {  # model: (outer, inner)
    "Llama-3.2-1B": (
        (0.009, 0.010, 0.016, 0.028, 0.051, 0.095, 0.181, 0.354, 0.703),
        (0.008, 0.009, 0.014, 0.023, 0.040, 0.074, 0.141, 0.275, 0.542),
    ),
    "Llama-3.1-8B": (
        (0.010, 0.016, 0.027, 0.050, 0.095, 0.182, 0.354, 0.703, 1.388),
        (0.009, 0.014, 0.023, 0.040, 0.074, 0.142, 0.275, 0.542, 1.075),
    ),
    "Llama-2-13B": (
        (0.014, 0.020, 0.033, 0.062, 0.116, 0.225, 0.441, 0.875, 1.730),
        (0.012, 0.017, 0.027, 0.049, 0.090, 0.175, 0.342, 0.675, 1.344),
    ),
}
POLAR_LENGTHS = (4096, 8192, 32768, 131072)
POLAR_TABLE_4 = {  # microseconds on an A800, one entry for each length
    "FP16 Matmul": (60.98, 74.20, 183.99, 668.91),
    "KIVI": (97.08, 133.92, 427.24, 1590.44),
    "KVQuant": (94.79, 121.42, 423.93, 1834.58),
    "PolarQuant": (50.04, 71.69, 163.42, 526.65),
}
KVQUANT_LENGTHS = (2048, 4096, 16384)
TABLE_22 = {  # microseconds on an A6000 by part, one entry for each length
    "k": {
        "fp16": (33.3, 59.1, 219.4),
        "packing": (4.5, 4.5, 4.5),
        "dense": (13.0, 24.1, 87.6),
        "sparse": (8.1, 11.2, 34.2),
        "total": (25.6, 39.9, 126.3),
    },
    "v": {
        "fp16": (26.0, 50.2, 203.7),
        "packing": (4.1, 4.1, 4.1),
        "dense": (10.0, 17.8, 62.0),
        "sparse": (7.9, 15.9, 58.2),
        "total": (22.1, 37.9, 124.5),
    },
}
TABLE_22_HEADER = ("fp16 Matvec", "Packing", "Dense Matvec", "Sparse Matvec", "Total")
PRODUCTS = {"scores": "q K^T", "values": "p V"}
Times = dict[int, float]  # milliseconds by length


class Table(NamedTuple):
    title: str
    note: str
    header: tuple[str, ...]
    lines: list[tuple[str, ...]]


def tables(report: GpuReport) -> list[Table]:
    """Return the tables for which there are rows."""
    made = []
    if any(row.section in PRODUCTS for row in report.rows):
        made += [
            _product_table(
                report,
                "InnerQ's Table 3: inner grouping against half precision",
                TABLE_3,
                EXACT,
                ("torch.matmul", "bf16 (XLA)"),
            ),
            _product_table(
                report,
                "InnerQ's Table 4: inner against outer grouping",
                TABLE_4,
                OUTER,
                ("outer", "outer"),
            ),
        ]
    if any(row.section == "quantize" for row in report.rows):
        made.append(_quantize_table(report))
    if any(row.section in KVQUANT_SECTIONS.values() for row in report.rows):
        made.append(_kvquant_table(report))
    if any(row.section == POLAR_SECTION for row in report.rows):
        made.append(_polarquant_table(report))
    return made


def _product_table(
    report: GpuReport, title: str, paper: dict, other: str, names: tuple[str, str]
) -> Table:
    lines = []
    for model in PAPER_MODELS:
        theirs, inner = (dict(zip(map(int, LENGTHS), times, strict=True)) for times in paper[model])
        lines += _block(model, "paper, RTX 4090", names[0], theirs, inner)
        for section, product in PRODUCTS.items():
            ours = [
                _times(_rows(report, section, model, candidate)) for candidate in (other, INNER)
            ]
            lines += _block(model, f"here, {product}", names[1], *ours)
    note = (
        "Milliseconds; speedup is 1 - inner / other, as the paper counts (its own from the times"
        " it prints). The paper does not say which of the two products it times, nor its shapes;"
        " its times fit one set of keys and values for each query head, as here. Quantized rows"
        f" are asymmetric with 2 bits. {_largest_error(report, *PRODUCTS)}"
    )
    return Table(title, note, ("model", "where", "method", *map(str, LENGTHS)), _filled(lines))


def _block(model: str, where: str, name: str, other: Times, inner: Times) -> list[tuple[str, ...]]:
    both = [length for length in LENGTHS if length in other and length in inner]
    speedup = {length: 1 - inner[length] / other[length] for length in both}
    return [
        (model, where, name, *_cells(other, "{:.4f}" if where.startswith("here") else "{:.3f}")),
        (model, where, "inner", *_cells(inner, "{:.4f}" if where.startswith("here") else "{:.3f}")),
        (model, where, "speedup", *_cells(speedup, "{:.1%}")),
    ]


def _quantize_table(report: GpuReport) -> Table:
    """Return the table for Figure 4's question: does hybrid quantization take longer than
    symmetric?"""
    lines = []
    for model in PAPER_MODELS:
        for side in ("keys", "values"):
            rows = {
                scheme: _rows(report, "quantize", model, f"{scheme}, {side}") for scheme in SCHEMES
            }
            for scheme, timed in rows.items():
                shares = {row.shape.tokens: report.share(row) for row in timed if row.samples_ms}
                times = _times(timed)
                cells = (
                    f"{times[n]:.4f} ({shares[n] or 0:.0%})" if n in times else "" for n in LENGTHS
                )
                lines.append((model, side, scheme, *cells))
            sym, hybrid = _times(rows["sym"]), _times(rows["hybrid"])
            lines.append(
                (
                    model,
                    side,
                    "hybrid / sym",
                    *_cells({n: hybrid[n] / sym[n] for n in sym if n in hybrid}, "{:.2f}"),
                )
            )
    note = (
        "Milliseconds, and in brackets the share of the measured copy bandwidth: rows read and"
        " everything written. Keys in groups of 32 channels, values in groups of 32 tokens; 2"
        " magnitude bits (sym and hybrid store a sign beside). The paper's figure prints no"
        f" numbers. {_largest_error(report, 'quantize')}"
    )
    header = ("model", "rows", "scheme", *map(str, LENGTHS))
    return Table(
        "InnerQ's Figure 4: quantizing and packing bf16 rows", note, header, _filled(lines)
    )


def _kvquant_table(report: GpuReport) -> Table:
    lines = []
    for (side, section), name in zip(KVQUANT_SECTIONS.items(), ("Key", "Value"), strict=True):
        ours = {part: _times(_rows(report, section, KVQUANT_MODEL, part)) for part in PARTS}
        for i, length in enumerate(KVQUANT_LENGTHS):
            theirs = [f"{TABLE_22[side][part][i]:.1f}" for part in PARTS]
            lines.append((name, str(length), "paper, A6000", *theirs))
            divided = {part: BLOCK if part == "packing" else 1 for part in PARTS}
            cells = [
                f"{1e3 * ours[part][length] / divided[part]:.1f}" if length in ours[part] else ""
                for part in PARTS
            ]
            lines.append((name, str(length), f"here, {report.device}", *cells))
    note = (
        "Microseconds; nuq4-1%, LLaMA-2-7B (32 heads of 128), batch 1. Total is one measurement,"
        f" with packing for the paper and without for us: {BLOCK} tokens are packed together, and"
        f" the cell is a {BLOCK}th of that. Keys are rotated while they are read; fp16 keys are"
        " read after RoPE. Packing, which XLA does in every path, is not compared with anything."
        f" {_largest_error(report, *KVQUANT_SECTIONS.values())}"
    )
    return Table(
        "KVQuant's Table 22: reading nuq4-1% keys and values",
        note,
        ("side", "l", "where", *TABLE_22_HEADER),
        lines,
    )


def _polarquant_table(report: GpuReport) -> Table:
    lines = [
        (name, "paper, A800", *(f"{time:.2f}" for time in times))
        for name, times in POLAR_TABLE_4.items()
    ]
    for candidate in (POLAR_EXACT, KIVI, KVQUANT, POLAR_SPEC):
        ours = _times(_rows(report, POLAR_SECTION, POLAR_MODEL, candidate))
        cells = (f"{1e3 * ours[length]:.2f}" if length in ours else "" for length in POLAR_LENGTHS)
        lines.append((candidate, f"here, {report.device}", *cells))
    note = (
        "Microseconds; q K^T, 32 heads of 128 with keys of their own, batch 1. The paper's"
        " PolarQuant stores one scale for a sequence, ours four numbers for a pair and 128 tokens;"
        f" KVQuant's keys are rotated while they are read. {_largest_error(report, POLAR_SECTION)}"
    )
    return Table(
        "PolarQuant's Table 4: query-key products",
        note,
        ("keys", "where", *map(str, POLAR_LENGTHS)),
        lines,
    )


def _filled(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the lines with an entry after their first three cells."""
    return [line for line in lines if any(line[3:])]


def _largest_error(report: GpuReport, *sections: str) -> str:
    errors = [row.error for row in report.rows if row.section in sections and row.error is not None]
    return (
        f"Largest relative error of the rows here: {max(errors):.1e}."
        if errors
        else "Errors of the rows here: not measured."
    )


def _rows(report: GpuReport, section: str, model: str, candidate: str) -> list[KernelRow]:
    """Return the rows of one arithmetic: assembly's if there are any."""
    chosen = [
        row
        for row in report.rows
        if (row.section, row.model, row.candidate) == (section, model, candidate)
    ]
    return [row for row in chosen if row.arithmetic == "asm"] or chosen


def _times(rows: Iterable[KernelRow]) -> Times:
    return {row.shape.tokens: row.median_ms for row in rows if row.samples_ms}


def _cells(times: Times, pattern: str) -> list[str]:
    return [pattern.format(times[length]) if length in times else "" for length in LENGTHS]
