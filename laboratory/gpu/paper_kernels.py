"""Time what three papers print latencies of, on a GPU: InnerQ, KVQuant and PolarQuant.

Options and files are those of `benchmarks.gpu.kernels`. Printed at the end: the papers' tables with
our times beside theirs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from benchmarks.gpu import page as gpu_page
from benchmarks.gpu.attention_candidates import Planned, shape_of
from benchmarks.gpu.compiling import leave
from benchmarks.gpu.kernels import measured, said_wrong
from benchmarks.gpu.plans import MAIN, Case, Plans
from benchmarks.gpu.quantize_candidates import quantize_tasks
from benchmarks.gpu.report import GpuReport
from benchmarks.markdown import table
from laboratory.gpu import kvquant_candidates, paper_tables, polarquant_candidates
from laboratory.gpu.innerq_candidates import PAPER_MODELS, paper_shape, product_tasks
from pallas_kernels.launch import Launch

MODULE = "laboratory.gpu.paper_kernels"
KVQUANT = kvquant_candidates.MODEL


class PaperCase(Case):
    """All candidates of a paper's table at one shape."""

    @property
    def tiny(self) -> Case:
        return self.cut(2048 if self.section == "kvquant" else 256)

    def tasks(self, launches: Sequence[Launch], specs: Sequence[str]) -> list[Planned]:
        make = {
            "products": product_tasks,
            "quantize": quantize_tasks,
            "kvquant": kvquant_candidates.table_tasks,
            "polarquant": polarquant_candidates.table_tasks,
        }[self.section]
        return make(self.shape, launches)


def _paper(section: str, *lengths: int, models: Sequence[str] = tuple(PAPER_MODELS)) -> list[Case]:
    return [
        PaperCase(section, model, paper_shape(model, tokens))
        for tokens in lengths
        for model in models
    ]


def parity_cases() -> list[Case]:
    """Return small shapes, for their errors and not their times."""
    small = paper_shape(MAIN, 1024)
    return [PaperCase(section, MAIN, small, both=True) for section in ("products", "quantize")]


def all_cases() -> list[Case]:
    """Return the tables' shapes, the first ones of InnerQ before those that compile for minutes."""
    cases = _paper("products", 131072, 32768, 8192, 2048, 512) + _paper("quantize", 32768)
    cases += [
        PaperCase("kvquant", KVQUANT, shape_of(KVQUANT, tokens, 1))
        for tokens in paper_tables.KVQUANT_LENGTHS
    ]
    cases += _paper(
        "polarquant", *paper_tables.POLAR_LENGTHS, models=(polarquant_candidates.MODEL,)
    )
    cases += _paper("products", *paper_tables.LENGTHS)
    return cases + _paper("quantize", 131072, 4096, 512)


def _of_shape(model: str, tokens: int, batch: int) -> list[Case]:
    cases: list[Case] = []
    if model in PAPER_MODELS:
        cases += _paper("products", tokens, models=(model,))
        cases += _paper("quantize", tokens, models=(model,))
    if (model, batch) == (polarquant_candidates.MODEL, 1):
        cases += _paper("polarquant", tokens, models=(model,))
    if (model, batch) == (KVQUANT, 1):
        cases.append(PaperCase("kvquant", model, shape_of(model, tokens, batch)))
    return cases


PLANS = Plans(
    ("products", "quantize", "kvquant", "polarquant"),
    {"parity": parity_cases, "all": all_cases},
    _of_shape,
)


def sections(report: GpuReport) -> list[str]:
    """Return the papers' tables as Markdown, each with its title and note."""
    return [
        "\n\n".join((f"## {paper.title}", paper.note, table(paper.header, paper.lines)))
        for paper in paper_tables.tables(report)
    ]


def page(report: GpuReport, file: pathlib.Path) -> str:
    """Render the papers' tables."""
    return "\n\n".join((gpu_page.kernels_page(report, file), *sections(report)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    report = measured(argv, PLANS, "The papers' tables of times", MODULE)
    print(*sections(report), sep="\n\n")
    return said_wrong(report)


if __name__ == "__main__":
    leave(main())
