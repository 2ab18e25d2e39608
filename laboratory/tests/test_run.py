"""The runner of studies: each study's numbers, with the command that made them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

import kvq_tools.cli
from laboratory import run

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"


def result(folder: pathlib.Path, *words: str) -> dict[str, Any]:
    """Return the file that the command wrote."""
    file = folder / "result.json"
    run.main([*words, f"--json={file}"])
    return json.loads(file.read_text())


def test_similarity_is_measured_for_every_pair_of_layers_and_window(tmp_path: pathlib.Path):
    words = (f"--text={PASSAGE}", "--windows=3", "--tokens=64")
    report = result(tmp_path, "layer_similarity", *words)
    assert report["command"].startswith("python -m laboratory.run layer_similarity ")
    assert str(tmp_path) not in report["command"], "a result names files, not a machine's folders"
    assert report["jax_version"]
    found = report["result"]
    cosines = np.asarray(found["cosines"])
    assert cosines.shape == np.shape(found["ranges"]) == (3, 3, len(found["kinds"]))
    stream, keys = (found["kinds"].index(kind) for kind in ("residual stream", "keys"))
    assert (cosines[1:, :, stream] > cosines[1:, :, keys]).all(), "a stream changes less than keys"
    assert (cosines[:, 0] != cosines[:, 1]).any(), "the second window is not a sequence of its own"


def test_every_window_has_a_response_of_its_own_and_keeps_its_numbers(tmp_path: pathlib.Path):
    """The first of two windows has the numbers that it has alone; the second one has others."""
    sizes = ("--prompt=32", "--response=32", "--rank=5", "--lam=0.001")
    one, two = (
        result(tmp_path, "squat_subspace", *sizes, f"--windows={windows}")["result"]
        for windows in (1, 2)
    )
    for field in ("errors", "deviations"):
        for alone, both in zip(one[field], two[field], strict=True):
            assert both | {"windows": both["windows"][:1]} == alone
            assert len(both["windows"]) == 2
    assert all(row["windows"][0] != row["windows"][1] for row in two["errors"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("layer_similarity", f"--text={PASSAGE}", "--tokens=1000000"), "passage.txt must have"),
        (("squat_subspace", "--rank", "5", "65"), "rank 65 must be at most the model's head_dim"),
        (("squat_subspace", "--windows=9"), "passage.txt must have 13824 tokens"),
        (("outliers", "--text=none.txt"), "none.txt"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        result(tmp_path, *words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "result.json").exists()
