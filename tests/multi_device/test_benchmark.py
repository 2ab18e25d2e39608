"""The benchmark of steps on a mesh runs, and splitting changes no logits."""

from __future__ import annotations

import pathlib

from benchmarks import mesh


def test_each_mesh_has_a_row_with_the_logits_of_one_device(tmp_path: pathlib.Path):
    mesh.main(["--quick", "--json", str(tmp_path / "mesh.json")])
    report = mesh.MeshReport.read(tmp_path / "mesh.json")
    rows = report.rows
    assert [row.mesh for row in rows] == ["", *mesh.MESHES[2:4]]
    assert [row.collectives > 0 for row in rows] == [False, True, True]
    assert all(0 < row.error < 1e-4 for row in rows[1:]), (
        "of sums in another order, and nothing else"
    )
    shown = mesh.page(report, tmp_path / "mesh.json")
    for row in rows:
        assert (
            f"| {row.step_ms:.2f} | {row.step_ms / rows[0].step_ms:.2f} | {row.collectives} |"
            in shown
        )
