"""Table B.2 as a command: a model whose outlier channels are planted is counted right, one whose truth is moved is not."""

from __future__ import annotations

import pathlib

import pytest

import kvq_tools.cli
from benchmarks import results_page
from benchmarks.quality import outlier_channels
from benchmarks.quality.outlier_channels import OutlierChannelsReport, TextChannels
from benchmarks.report_file import header

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"


def test_the_page_counts_layers_whose_channel_is_among_the_first_predictions(tmp_path: pathlib.Path):
    texts = (
        TextChannels("one.txt", (3, 5, 7, 9), (1, 2, 8, None), (True, True, True, False), (False,) * 4),
        TextChannels("other.txt", (3, 5, 7, 8), (1, 1, 4, 5), (True,) * 4, (True, False, False, False)),
    )
    report = OutlierChannelsReport(title="Outlier channels", **header(["x"]), model="m", tokens=64, texts=texts)
    report.write(tmp_path / "outlier_channels.json")
    page = results_page.render(tmp_path)["outlier_channels.md"]
    for line in ("| k=1 | 25.0 % | 50.0 % |", "| k=2 | 50.0 % | 50.0 % |", "| k=4 | 50.0 % | 75.0 % |", "| k=8 | 75.0 % | 100.0 % |"):
        assert line in page, f"{line!r} is missing from\n{page}"
    assert "| layers | 75.0 % | 100.0 % |" in page
    assert "| layers | 0.0 % | 25.0 % |" in page
    assert "the same channel in 75.0 % of the layers" in page


def test_the_command_measures_every_layer(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "outlier_channels.json"
    outlier_channels.main([f"--json={file}", "--texts", str(PASSAGE), "--tokens=64"])
    (text,) = OutlierChannelsReport.read(file).texts
    assert len(text.channels) == len(text.places) == 4
    assert all(0 <= channel < 128 for channel in text.channels)
    assert text.places[0] == 1, "the first layer of this model was wired so that one direction of keys has all the size"
    with pytest.raises(SystemExit):
        outlier_channels.main([f"--json={file}", "--texts", str(PASSAGE), "--tokens=1000000"])
    assert "passage.txt must have 1000000 tokens" in capsys.readouterr().err
