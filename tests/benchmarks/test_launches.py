"""Committed counts of what a decode step launches on a GPU."""

import json
import pathlib

from benchmarks.machine_code import launches
from benchmarks.machine_code.launches import POINTS, SPECS, LaunchReport

FILES = sorted((pathlib.Path(launches.__file__).parents[1] / "results").glob("launches*.json"))


def test_committed_counts_have_no_loop_or_branch_in_a_layer():
    """Whatever the batch, nor a branch, and few launches: a graph captures the step."""
    assert len({json.loads(file.read_text())["jax_version"] for file in FILES}) >= 2, (
        "versions of JAX are compared"
    )
    for file in FILES:
        rows = LaunchReport.read(file).rows
        assert {(row.spec, row.tokens, row.batch) for row in rows} == {
            (spec, *point) for spec in SPECS for point in POINTS
        }
        for row in rows:
            assert not row.loops, f"{file.name}: {row.spec} at batch {row.batch}"
            assert row.beside <= 12, f"{file.name}: {row.spec} at batch {row.batch}"
            assert (row.branches, row.graphs, row.outside) == (0, 1, 0), (
                f"{file.name}: {row.spec} at batch {row.batch}"
            )
