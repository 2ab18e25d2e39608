"""Tests of the windows that a calibration draws."""

import numpy as np

from kvq_models.calibration import samples

BOS, LENGTH, COUNT = 2, 8, 200
TEXT = np.concatenate([[BOS], np.arange(100, 120)])


def test_windows_begin_with_the_token_that_opens_the_text():
    windows = samples.draw(TEXT, COUNT, LENGTH, 0, BOS)
    assert windows.shape == (COUNT, LENGTH + 1)
    assert (windows[:, 0] == BOS).all()
    assert (windows[:, 1:] != BOS).all(), "it opens a window once"
    assert (np.diff(windows[:, 1:]) == 1).all(), "the others follow each other as in the text"
    assert set(windows[:, 1]) == set(range(100, 113)), "from the first one to the last that fits"


def test_windows_of_a_text_without_it_are_the_texts_own():
    for bos in (None, BOS):
        windows = samples.draw(TEXT[1:], COUNT, LENGTH, 0, bos)
        assert (np.diff(windows) == 1).all(), f"{bos=}"
        assert set(windows[:, 0]) == set(range(100, 112)), f"{bos=}"


def test_a_text_of_one_window_gives_that_window():
    for text, bos in ((TEXT[: LENGTH + 1], BOS), (TEXT[1 : LENGTH + 2], None)):
        windows = samples.draw(text, 3, LENGTH, 0, bos)
        np.testing.assert_array_equal(windows, [text] * 3, err_msg=f"{bos=}")
