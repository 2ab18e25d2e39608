"""The verdict of a report: a cache is named only among equal windows, and only if the windows of
the text tell it apart."""

import dataclasses
import pathlib

import numpy as np
import pytest

from kvq_tools.evaluation.intervals import paired_ratio
from kvq_tools.report import schema
from kvq_tools.report.quality import advice, verdict

COMMITTED = pathlib.Path(__file__).with_name("smollm2_report.json")
HARD = (0.5, 1.5, 0.8, 1.2)  # how much harder a window is than the mean


@pytest.fixture(scope="module")
def report():
    return schema.read(COMMITTED)


def cache(report, name, bits, kl, factors=None, **fields):
    """Return a cache whose KL in each window is the window's hardness times a factor, by default
    near 1 and different for every name."""
    if factors is None:
        factors = np.random.default_rng(ord(name[0])).lognormal(0, 0.05, len(HARD)).tolist()
    windows = tuple(kl * hard * factor for hard, factor in zip(HARD, factors, strict=True))
    fixed = {"agreement": 0.9, "sink": 0, "recent": 0, "quantized_tokens": 1000} | fields
    return dataclasses.replace(
        report.caches[0], name=name, bits_per_element=bits, kl=kl, window_kl=windows, **fixed
    )


def told(report, *caches):
    return verdict(dataclasses.replace(report, caches=caches))


def test_it_names_the_caches_that_the_windows_tell_apart_from_the_largest_to_the_smallest(report):
    smallest, largest = cache(report, "a", 2.5, 0.3), cache(report, "b", 5.04, 0.004)
    further, exact = cache(report, "c", 5.1, 0.01), cache(report, "dense", 16.0, 0.0)
    assert told(report, smallest, largest, further, exact) == (
        "At 5.0 bits take b (KL 0.004, 90% of likeliest tokens kept), at 2.5 bits take a (KL 0.3,"
        " 90% of likeliest tokens kept); c is no smaller and further from full precision."
    )
    worse = told(report, smallest, cache(report, "b", 5.04, 0.4), further)
    assert "take c" in worse, "the sentence follows the numbers"
    assert "b is no smaller and further" in worse


def test_the_advice_says_what_its_intervals_leave_out(report):
    def advised(stride: int) -> str:
        request = dataclasses.replace(report.request, window=1024, stride=stride)
        return advice(dataclasses.replace(report, request=request))

    each = "not corrected for the number of comparisons"
    assert (
        f"{each}, and taken as if windows were independent, though neighbours share 256 tokens."
        in advised(768)
    )
    assert f"{each}." in advised(1024)


def test_caches_with_other_windows_are_not_ranked(report):
    equal = cache(report, "a", 2.5, 0.3), cache(report, "b", 5.0, 0.004)
    assert "take b" in told(report, *equal)
    for fields in ({"sink": 32}, {"recent": 96}, {"quantized_tokens": 900}):
        said = told(report, equal[0], cache(report, "b", 5.0, 0.004, **fields))
        assert "take" not in said, (fields, said)
        assert said.startswith("No cache is named, because they keep different tokens exact"), said
    exact = cache(report, "dense", 16.0, 0.0, quantized_tokens=0)
    assert "take b" in told(report, *equal, exact), "full precision has no windows to compare"


def test_a_better_mean_is_no_winner_if_the_windows_overlap(report):
    """The larger cache has a quarter less KL, but more of it in one of four windows."""
    smaller = cache(report, "a", 2.5, 0.010)
    larger = cache(report, "b", 3.0, 0.0075, (0.5, 1.5, 0.7, 1.1))
    low, high = paired_ratio(larger.window_kl, smaller.window_kl).interval
    assert low < 1 < high
    said = told(report, smaller, larger)
    assert "take b" not in said
    assert said.endswith("; b is not told apart from a."), said
    both = told(report, smaller, larger, dataclasses.replace(larger, name="c"))
    assert both.endswith("; b and c are not told apart from a."), both


def test_one_window_tells_nothing_apart(report):
    smaller, larger = cache(report, "a", 2.5, 0.3), cache(report, "b", 5.0, 0.004)
    alone = [dataclasses.replace(one, window_kl=one.window_kl[:1]) for one in (smaller, larger)]
    assert "b is not told apart from a" in told(report, *alone)
    failed = dataclasses.replace(larger, window_kl=(None, *larger.window_kl[1:]))
    assert "b is not told apart from a" in told(report, smaller, failed)
