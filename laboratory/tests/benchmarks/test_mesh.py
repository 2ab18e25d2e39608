"""The benchmark of steps on a mesh runs, and splitting changes no logits."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

from benchmarks import mesh
from benchmarks.report_file import RESULTS


def test_each_mesh_has_a_row_with_the_logits_of_one_device(tmp_path: pathlib.Path):
    file = tmp_path / "mesh.json"
    # in a process of its own, which asks for several devices before JAX starts
    command = [sys.executable, "-m", "benchmarks.mesh", "--quick", "--json", str(file)]
    subprocess.run(command, check=True)
    report = mesh.MeshReport.read(file)
    rows = report.rows
    assert [row.mesh for row in rows] == ["", *mesh.MESHES[2:4]]
    assert [row.collectives > 0 for row in rows] == [False, True, True]
    assert all(0 < row.error < 1e-4 for row in rows[1:]), (
        "of sums in another order, and nothing else"
    )
    for row in rows:
        assert len(row.cycle.ageing) * row.cycle.block == len(row.samples_ms)
        assert row.step_ms == row.cycle.step(row.samples_ms)
        assert row.ratio == row.cycle.ratio(row.samples_ms, rows[0].samples_ms)
    shown = mesh.page(report, file)
    assert "not timed in turns" not in shown
    for row in rows:
        assert f"| {row.step_ms:.2f} | {row.ratio:.2f} | {row.collectives} |" in shown


def test_an_older_page_says_that_nothing_took_turns_and_no_step_quantized_a_block():
    file = RESULTS / "mesh.json"
    report = mesh.MeshReport.read(file)
    old = tuple(dataclasses.replace(row, ratio=0.0, samples_ms=(2.0, 3.0)) for row in report.rows)
    shown = mesh.page(dataclasses.replace(report, rows=old), file)
    assert "**not timed in turns**" in shown
    assert "**No timed step quantizes a block** of a packed cache." in shown
