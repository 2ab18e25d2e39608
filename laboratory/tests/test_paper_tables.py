"""The papers' tables: every entry is a cache, and variants of the model stand side by side."""

from __future__ import annotations

import pathlib

import pytest

import kvq_jax as kvq
import kvq_tools.cli
from laboratory import results_page
from laboratory.quality import __main__ as quality
from laboratory.quality.comparison import PLAIN, Suite, listed, swept
from laboratory.quality.report import QualityReport, QualityRow
from laboratory.quality.suites import SUITES
from laboratory.quality.variants import VARIANTS

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"
SUITE = Suite(
    "A title",
    (
        listed("A", [("exact", "dense"), ("a scale for a token", "int4")], stressed=True),
        swept(
            "C", "w_recent", [("KIVI", [(str(n), f"kivi:recent={n},block=32") for n in (0, 32)])]
        ),
    ),
    VARIANTS,
)


@pytest.fixture(scope="module")
def folder(shallow, tmp_path_factory):
    """Return the folder in which a small run with variants left its report."""
    folder = tmp_path_factory.mktemp("quality")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "innerq", lambda: SUITE)
        quality.main(
            [
                "innerq",
                f"--model={shallow}",
                f"--text={PASSAGE}",
                f"--calibration-text={PASSAGE}",
                *("--windows=3", "--window=96", "--prompt=0"),
                "--stressed",
                f"--json={folder / 'quality_small.json'}",
            ]
        )
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return QualityReport.read(folder / "quality_small.json")


def only(report: QualityReport, table: str, *cells: str, variant: str = PLAIN) -> QualityRow:
    (row,) = (row for row in report.of(table) if row.cells == cells and row.variant == variant)
    return row


def test_variants_predict_the_same_and_are_harder_to_cache(report):
    assert report.variants("A") == [PLAIN, *VARIANTS]
    for variant in (PLAIN, *VARIANTS):
        exact = only(report, "A", "exact", variant=variant)
        assert exact.nats == pytest.approx(only(report, "A", "exact").nats, rel=1e-5), variant
        if variant != PLAIN:
            easy, hard = (
                only(report, "A", "a scale for a token", variant=v).kl for v in (PLAIN, variant)
            )
            assert hard > 2 * easy, f"{variant}: KL {hard}, without outliers {easy}"


def test_the_page_has_variants_side_by_side_and_a_grid_of_each(report, folder):
    page = results_page.render(folder)["quality_small.md"]
    assert (
        "| cache | spec | stored bits | cache KiB | as it is | key outliers | value outliers |"
        in page
    )
    assert "key outliers: 4 RoPE pairs of each head's keys times 12" in page
    for variant in (PLAIN, *VARIANTS):
        cells = " | ".join(
            f"{row.perplexity:.2f} ({row.kl:.4f} [{row.kl_interval.low:.4f},"
            f" {row.kl_interval.high:.4f}])"
            for row in report.of("C")
            if row.variant == variant
        )
        assert f"| {variant}: w_recent | 0 | 32 |\n| --- | --- | --- |\n| KIVI | {cells} |" in page


@pytest.mark.parametrize("name", SUITES)
def test_every_entry_of_a_suite_is_a_cache_with_a_place_of_its_own(name):
    for comparison in SUITES[name]().comparisons:
        for entry in comparison.entries:
            kvq.parse(entry.cache)
            assert len(entry.cells) == len(comparison.heads), f"{comparison.title}: {entry}"
        places = [(entry.cells, entry.column) for entry in comparison.entries]
        assert len(set(places)) == len(places), f"{comparison.title} has two caches in one place"
