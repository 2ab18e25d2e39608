"""The verdict of a report: a sentence computed from the front."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from kvq_tools.report import schema
from kvq_tools.report.quality import front_by, verdict

COMMITTED = pathlib.Path(__file__).parents[3] / "docs" / "report" / "report.json"


@pytest.fixture(scope="module")
def report():
    return schema.read(COMMITTED)


def with_numbers(report, *numbers):
    """Return the report with caches of these (name, bits, KL)."""
    caches = [
        dataclasses.replace(
            report.caches[i], name=name, bits_per_element=bits, kl=kl, agreement=0.9
        )
        for i, (name, bits, kl) in enumerate(numbers)
    ]
    return dataclasses.replace(report, caches=tuple(caches))


def test_it_names_the_front_from_the_largest_to_the_smallest(report):
    told = verdict(
        with_numbers(
            report, ("a", 2.5, 0.3), ("b", 5.04, 0.004), ("c", 5.1, 0.01), ("dense", 16.0, 0.0)
        )
    )
    assert (
        told
        == "At 5.0 bits take b (KL 0.004, 90% of likeliest tokens kept), at 2.5 bits take a (KL"
        " 0.3, 90% of likeliest tokens kept); the other 1 is larger or further from full"
        " precision."
    )
    worse = verdict(with_numbers(report, ("a", 2.5, 0.3), ("b", 5.04, 0.4), ("c", 5.1, 0.01)))
    assert "take c" in worse, "the sentence follows the numbers"
    assert "take b" not in worse, "the sentence follows the numbers"


def test_two_sizes_that_one_digit_would_not_tell_apart_have_two(report):
    told = verdict(with_numbers(report, ("a", 3.64, 0.02), ("b", 3.56, 0.03)))
    assert "At 3.64 bits take a" in told, told
    assert "at 3.56 bits take b" in told, told


def test_without_a_quantized_cache_there_is_nothing_to_choose(report):
    assert "nothing is to be chosen" in verdict(
        with_numbers(report, ("dense", 16.0, 0.0), ("kivi", 15.0, 0.0))
    )


def test_the_committed_report_has_its_caches_in_it(report):
    on_front = [
        c.name
        for c, on in zip(report.caches, front_by(report, "kl"), strict=True)
        if on and c.bits_per_element < 16 and c.kl > 1e-6
    ]
    assert on_front
    assert all(f"take {name} (" in verdict(report) for name in on_front)
