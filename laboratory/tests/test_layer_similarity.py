"""The two measures of similarity, on rows made for them."""

from __future__ import annotations

import numpy as np
import pytest

from laboratory.studies.layer_similarity import cosine, relative_range


def test_rows_that_change_little_have_a_cosine_near_one_and_a_small_range():
    rng = np.random.default_rng(0)
    before, change = (rng.normal(size=(200, 64)).astype(np.float32) for _ in range(2))
    assert cosine(before, before) == pytest.approx(1, abs=1e-6)
    assert cosine(-before, before) == pytest.approx(-1, abs=1e-6)
    assert cosine(3 * before, before) == pytest.approx(1, abs=1e-6), "lengths count"
    assert abs(cosine(change, before)) < 0.05
    assert cosine(before + change, before) == pytest.approx(0.5**0.5, abs=0.02)
    assert relative_range(before + 0.1 * change, before, 16) == pytest.approx(0.1, abs=0.01)
    assert relative_range(change, before, 16) == pytest.approx(2**0.5, abs=0.1), (
        "what has nothing in common is harder to code"
    )
    with pytest.raises(ValueError, match="groups of 48 channels do not divide rows of 64"):
        relative_range(change, before, 48)


def test_a_range_is_that_of_a_group_of_channels():
    before, after = (
        np.zeros((1, 8), np.float32),
        np.asarray([[0, 1, 0, 1, 0, 100, 0, 100]], np.float32),
    )
    before[0, 7] = 50
    assert relative_range(after, before, 4) == pytest.approx((1 + 1) / 2)
    assert relative_range(after, 0.5 * after, 4) == pytest.approx(0.5)
