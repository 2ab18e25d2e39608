"""When `kvq demo` says that a cache is faster than the first one."""

import statistics

import pytest

from kvq_tools.cli.layer_times import CONTEXTS, faster_from, is_faster

ROUNDS = 8
BASELINE = [[context / 1024] * ROUNDS for context in CONTEXTS]
FASTER, SLOWER = [0.5] * ROUNDS, [1.5] * ROUNDS
BY_CHANCE = [0.97] * 5 + [1.3] * 3  # the median is below 1


@pytest.mark.parametrize(
    ("ratios", "context"),
    [
        ((FASTER, FASTER, FASTER, FASTER), 1024),
        ((BY_CHANCE, FASTER, FASTER, FASTER), 4096),
        ((FASTER, SLOWER, FASTER, FASTER), 16384),
        ((FASTER, FASTER, FASTER, BY_CHANCE), None),
    ],
)
def test_a_cache_is_faster_from_where_three_of_four_rounds_are(ratios, context):
    taken = [
        [one * ratio for one, ratio in zip(base, each, strict=True)]
        for base, each in zip(BASELINE, ratios, strict=True)
    ]
    assert faster_from(taken, BASELINE) == context


def test_a_cache_whose_printed_time_is_longer_is_not_called_faster():
    """On a machine of two speeds nearly all rounds may be faster, and the median is the longer."""
    theirs = [1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0]
    mine = [0.9, 0.9, 0.9, 8.0, 8.0, 8.0, 8.0]
    assert sum(a < b for a, b in zip(mine, theirs, strict=True)) == 6
    assert statistics.median(mine) > statistics.median(theirs)
    assert not is_faster(mine, theirs)
    assert is_faster([0.9 * one for one in theirs], theirs)
