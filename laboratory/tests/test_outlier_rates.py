"""Table B.2 as a command: a model whose outlier channels are planted is counted right, one whose
truth is moved is not."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import kvq_tools.cli
from benchmarks.report_file import header
from kvq_models import EMBEDDED, load_llama
from kvq_tools.evaluation.intervals import mean_interval
from laboratory import results_page
from laboratory.outlier_channels import decompose, layer_magnitudes
from laboratory.quality import outlier_channels
from laboratory.quality.outlier_channels import OutlierChannelsReport, Rivals, TextChannels
from laboratory.study import first_tokens

PASSAGE = pathlib.Path(kvq_tools.cli.__file__).parent / "passage.txt"


def rivals(*channels: int) -> tuple[Rivals, ...]:
    """Layers in which one channel is the largest of every window."""
    return tuple(Rivals((channel,), ((2.0,), (1.0,))) for channel in channels)


def written(report: OutlierChannelsReport, folder: pathlib.Path) -> str:
    report.write(folder / "outlier_channels.json")
    assert OutlierChannelsReport.read(folder / "outlier_channels.json") == report
    return results_page.render(folder)["outlier_channels.md"]


def report_of(*texts: TextChannels) -> OutlierChannelsReport:
    predicted = tuple(tuple(range(first, first + 8)) for first in (0, 10, 20, 30))
    return OutlierChannelsReport(
        title="Outlier channels",
        **header(["x"]),
        model="m",
        tokens=64,
        windows=2,
        predicted=predicted,
        texts=texts,
    )


def test_the_page_counts_layers_whose_channel_is_among_the_first_predictions(
    tmp_path: pathlib.Path,
):
    one = TextChannels("one.txt", rivals(0, 11, 27, 39), rivals(0, 0, 0, 1), rivals(1, 1, 1, 1))
    other = TextChannels("other.txt", rivals(0, 11, 27, 34), rivals(0, 0, 0, 0), rivals(0, 1, 1, 1))
    page = written(report_of(one, other), tmp_path)
    for k, found, others in (
        (1, "25.0", "25.0"),
        (2, "50.0", "50.0"),
        (4, "50.0", "50.0"),
        (8, "75.0", "100.0"),
    ):
        line = f"| k={k} | {found} %; of a window {found} | {others} %; of a window {others} |"
        assert line in page, f"{line!r} is missing from\n{page}"
    assert "| layers | 75.0 %; of a window 75.0 | 100.0 %; of a window 100.0 |" in page
    assert "| layers | 0.0 %; of a window 0.0 | 25.0 %; of a window 25.0 |" in page
    assert "the same channel in 75.0 % of the layers" in page


def test_an_interval_is_that_of_windows_that_disagree(tmp_path: pathlib.Path):
    """In the last layer, channel 39 is no prediction and has the larger mean, but not in the second
    window."""
    divided = Rivals((30, 39), ((1.0, 3.0), (1.5, 0.5)))
    keys = (*rivals(0, 11, 27), divided)
    page = written(
        report_of(TextChannels("one.txt", keys, rivals(0, 0, 0, 0), rivals(0, 0, 0, 0))), tmp_path
    )
    (low, high), (less, more) = mean_interval([75, 100]), mean_interval([50, 75])
    assert f"| k=8 | 75.0 %; of a window 87.5 [{low:.1f}, {high:.1f}] |" in page
    assert f"| k=2 | 50.0 %; of a window 62.5 [{less:.1f}, {more:.1f}] |" in page


def test_rivals_are_the_channels_that_are_not_exceeded_in_every_window():
    magnitudes = np.asarray([[5, 1, 4, 2, 0], [1, 5, 3, 4, 0]], np.float32)
    found = Rivals.of(magnitudes)
    assert found.channels == (0, 1, 2, 3), (
        "channel 4 is exceeded everywhere; the others each have a window where none of the rest are"
    )
    assert Rivals.of(magnitudes[:1]).channels == (0,)
    assert found.largest_by_window().tolist() == [0, 1]
    assert found.largest() == 2, "the largest mean belongs to a channel that is ahead nowhere"
    turned = Rivals.of(magnitudes[:, ::-1])
    assert (turned.largest(), *turned.largest_by_window()) == (2, 4, 3)


def test_the_command_measures_every_layer(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Windows of 32 tokens; the mean over them is that of `kvq doctor`, which reads all of them at
    once."""
    monkeypatch.setattr(outlier_channels, "WINDOW", 32)
    file = tmp_path / "outlier_channels.json"
    outlier_channels.main([f"--json={file}", "--texts", str(PASSAGE), "--tokens=64"])
    report = OutlierChannelsReport.read(file)
    (text,) = report.texts
    assert len(text.keys) == len(report.predicted) == 4
    assert all(
        len(layer.magnitudes) == 2
        for side in (text.keys, text.latent_k, text.latent_v)
        for layer in side
    )
    assert report.predicted[0][0] == text.keys[0].largest(), (
        "the first layer of this model was wired so that one direction of keys has all the size"
    )
    llama, tokenizer = load_llama(EMBEDDED, dtype="float32")
    rows = first_tokens(tokenizer, PASSAGE, 64).reshape(2, 32)
    parts = [
        [decompose(np.asarray(p.kernel[...])).u for p in (layer.k_proj, layer.v_proj)]
        for layer in llama.layers
    ]
    for layer, wanted in enumerate(layer_magnitudes(llama, rows, iter(parts))):
        for side in ("keys", "latent_k", "latent_v"):
            rivals, magnitudes = getattr(text, side)[layer], getattr(wanted, side)
            assert rivals.largest() == magnitudes.argmax(), (layer, side)
            np.testing.assert_allclose(
                np.mean(rivals.magnitudes, axis=0), magnitudes[list(rivals.channels)], rtol=1e-4
            )
            assert rivals.magnitudes[0] != rivals.magnitudes[1], "the windows are of different text"
    with pytest.raises(SystemExit):
        outlier_channels.main([f"--json={file}", "--texts", str(PASSAGE), "--tokens=1000000"])
    assert "passage.txt must have 1000000 tokens" in capsys.readouterr().err
