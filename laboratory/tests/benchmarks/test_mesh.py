"""The benchmark of steps on a mesh runs, and splitting changes no logits."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from benchmarks import mesh


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
    shown = mesh.page(report, file)
    for row in rows:
        assert (
            f"| {row.step_ms:.2f} | {row.step_ms / rows[0].step_ms:.2f} | {row.collectives} |"
            in shown
        )
