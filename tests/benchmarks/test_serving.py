"""The sequences that fit are those that `engine_size` counts, and the page has the committed
numbers."""

import pathlib

import numpy as np

from benchmarks import serving, serving_report, serving_start
from benchmarks.report_file import RESULTS
from kvq_models.inference.engine.engine_size import engine_size
from tests.kvq_models.checkpoints import tiny_config


def test_the_sequences_that_fit_are_those_that_engine_size_counts():
    config, found = tiny_config(max_position_embeddings=640), {}
    for cache in ("dense", "kivi:bits=4", "kivi:bits=2"):
        memory = engine_size("dense", config, slots=9, capacity=640, dtype="bfloat16").nbytes
        row = serving.room_of(cache, config, 640, memory)
        assert engine_size(cache, config, memory=memory, dtype="bfloat16").slots == row.sequences
        assert (
            engine_size(
                cache, config, slots=row.sequences + 1, capacity=640, dtype="bfloat16"
            ).nbytes
            > memory
        )
        found[cache] = row.sequences
    assert found["dense"] == 9
    assert found["dense"] < found["kivi:bits=4"] < found["kivi:bits=2"]
    assert serving.room_of("dense", config, 640, 100).sequences == 0


def test_the_numbers_of_the_page_are_those_of_the_results():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    report, start = (
        serving_report.ServingReport.read(RESULTS / "serving.json"),
        serving_start.StartReport.read(RESULTS / "serving_start.json"),
    )

    def row(slots: int, new: int, activations: str = "float32") -> serving_report.ServingRow:
        (only,) = (
            row
            for row in report.rows
            if (row.slots, row.new[1], row.activations) == (slots, new, activations)
        )
        return only

    def times_one_slot(activations: str) -> str:
        one, eight = (row(n, 256, activations) for n in (1, 8))
        return f"{eight.new_tokens / eight.seconds:.0f}, {one.seconds / eight.seconds:.2f}"

    alone, slots = row(serving_report.ALONE, 64), row(8, 64)
    prefix = next(row for row in report.prefixes if row.cache == "kivi:bits=4")
    first, again = start.rows
    for told in (
        f"{alone.seconds / slots.seconds:.2f}",
        "; ".join(times_one_slot(activations) for activations in ("float32", "int8")),
        f"{np.median(slots.first_token):.1f} s; {np.median(alone.first_token):.1f} s",
        "; ".join(str(row.sequences) for row in report.room),
        f"{prefix.read:.1f} s; {prefix.memory:.2f} s; {prefix.disk:.2f} s",
        f"{first.seconds:.0f} s; {again.seconds:.0f} s",
    ):
        assert f"| {told} |" in page, told
