"""The overview: sizes of an 8B model's caches by hand, quality of a small run, and its tables."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import kvq_jax as kvq
import kvq_tools.cli
from benchmarks import llama_8b, overview
from benchmarks.overview import OverviewReport

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"
CACHES = ("dense", "kivi:bits=2,recent=32")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> OverviewReport:
    file = tmp_path_factory.mktemp("results") / "overview.json"
    texts = f"--text={PASSAGE}", f"--calibration-text={PASSAGE}"
    overview.main(
        ["--windows=4", "--window=256", "--prompt=64", *texts, f"--json={file}", "--cache", *CACHES]
    )
    return OverviewReport.read(file)


def test_sizes_of_an_8b_model_are_those_of_its_dimensions():
    config = llama_8b.llama_config()
    dense = (
        2 * 32 * 8 * 128 * overview.CONTEXT * 2
    )  # sides, layers, KV heads, channels, tokens, bytes
    assert dense == 4 * 2**30
    assert overview.size("dense", config, overview.CONTEXT)["cache_bytes"] == pytest.approx(
        dense, rel=1e-4
    )
    kivi = overview.size("kivi:bits=4,group_size=32,recent=0,block=32", config, overview.CONTEXT)
    codes, scales = (
        dense // 4,
        dense // 16,
    )  # 4 of 16 bits; an fp16 scale and zero point for each 32 elements of bf16
    assert kivi["cache_bytes"] == pytest.approx(codes + scales, rel=5e-3)
    assert kivi["stored_bits"] == pytest.approx(5, rel=5e-3)
    assert kivi["ratio"] == pytest.approx(16 / 5, rel=5e-3)


def test_the_body_share_counts_the_tokens_before_each_position():
    config, positions = llama_8b.llama_config(1), np.array([31, 64, 100])
    assert overview.body_share("kivi:recent=32,block=32", config, 256, positions) == pytest.approx(
        (0 + 32 + 64) / 195
    )
    assert overview.body_share("dense", config, 256, positions) == 1


def test_a_run_measures_every_cache(report: OverviewReport):
    exact, coded = report.rows
    assert tuple(row.cache for row in report.rows) == CACHES
    assert report.command.endswith(f"--cache {' '.join(CACHES)}")
    assert abs(exact.measured.kl) < 1e-5
    assert coded.measured.kl > 1e-3
    assert coded.measured.agreement < exact.measured.agreement == 1
    assert coded.cache_bytes < exact.cache_bytes / 4
    assert coded.measured.stored_bits == kvq.body_bits_per_element(
        CACHES[1], llama_8b.llama_config(1)
    )  # heads of 64 and 128 have the same groups
    assert coded.measured.tokens == 4 * (256 - 64 - 1)


def test_its_tables_hold_the_measured_numbers(report: OverviewReport):
    coded = report.rows[1]
    size = coded.cache_bytes / 2**30
    assert (
        f"| `{coded.cache}` | {coded.stored_bits:.2f} | {coded.measured.kl:.4f} | {size:.2f} GiB |"
        in overview.readme_table(report)
    )
    low, high = coded.measured.kl_interval
    quality = f"{coded.measured.kl:.5f} [{low:.5f}, {high:.5f}]"
    page = overview.page(report, pathlib.Path("o.json"))
    assert (
        f"| `{coded.cache}` | {coded.stored_bits:.3f} | {size:.3f} | {coded.ratio:.2f} |"
        f" {quality} |" in page
    )


def test_committed_caches_are_read_quantized():
    committed = OverviewReport.read(
        pathlib.Path(overview.__file__).parent / "results" / "overview.json"
    )
    assert tuple(row.cache for row in committed.rows) == overview.CACHES
    for row in committed.rows:
        assert row.measured.tokens > 2000, row
        assert row.body_share > 0.5, row
