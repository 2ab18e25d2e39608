"""The subspace of SQuat by hand, and the benchmark of its prefill."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks.cpu.timing import CpuReport
from kvq_models import EMBEDDED, load_llama
from laboratory import squat_prefill
from laboratory.studies.squat_subspace import ROOT, before_rope, deviations, layer_inputs, tokens_of

PROMPT, TOTAL = 256, 384


def test_deviation_falls_with_the_rank_to_zero_and_is_zero_inside():
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    text = (ROOT / "kvq_tools/cli/passage.txt").read_text(encoding="utf-8")
    tokens = np.asarray(tokenizer(text, verbose=False).input_ids[:TOTAL], np.int32)
    inputs = before_rope(layer_inputs(llama, tokens)[1])
    prompt, later = tokens_of(inputs, 0, PROMPT), inputs.q_rot[:, :, PROMPT:]
    found = deviations(prompt.q_rot, later, 2)
    assert (np.diff(found) <= 1e-6).all()
    assert found[-1] < 1e-2 < 0.3 < found[0] < 1
    narrow = prompt.q_rot.at[..., 8:].set(0)  # 8 dimensions
    assert deviations(narrow, narrow, 2)[7] < 1e-2 < deviations(narrow, narrow, 2)[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("results")
    small = [
        "--quick",
        "--head-dim",
        "32",
        "--kv-heads",
        "2",
        "--group",
        "2",
        "--cache",
        "kivi",
        "squat",
        "squat_pre",
    ]
    squat_prefill.main([*small, "--json", str(folder / "squat_prefill_cpu.json")])
    return folder


def test_the_prefill_benchmark_has_a_row_for_each_cache(results: pathlib.Path):
    report = CpuReport.read(results / "squat_prefill_cpu.json")
    assert [row.implementation for row in report.rows] == ["kivi", "squat", "squat_pre"]
    assert all(row.error < 1e-4 for row in report.rows)
    assert report.rows[1].cache_bytes > report.rows[0].cache_bytes, "the matrices take memory"
