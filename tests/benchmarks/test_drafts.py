"""The benchmark of drafts counts steps and tokens, and sees tokens that differ."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from benchmarks import drafts


def test_each_text_is_decoded_each_way(
    model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        drafts, "TEXTS", {"a word again and again": ("the cat the cat the cat the cat", False)}
    )
    file = tmp_path / "drafts.json"
    cache = "kivi:bits=2,recent=16,block=32"
    drafts.main(
        [
            "--model",
            str(model),
            "--cache",
            cache,
            "--drafts",
            "3",
            "--new",
            "24",
            "--repeats",
            "1",
            "--json",
            str(file),
        ]
    )
    report = drafts.DraftReport.read(file)
    plain, drafted = report.rows
    assert (plain.drafts, plain.steps) == (0, plain.new_tokens)
    assert (drafted.drafts, drafted.new_tokens, drafted.same) == (3, plain.new_tokens, True)
    assert drafted.new_tokens / 4 <= drafted.steps <= plain.steps
    assert min(*plain.seconds, *drafted.seconds) > 0
    shown = drafts.page(report, file)
    assert f"| {drafted.steps} | {drafted.new_tokens / drafted.steps:.2f} |" in shown
    assert "| no |" not in shown
    other = dataclasses.replace(report, rows=(plain, dataclasses.replace(drafted, same=False)))
    assert "| no |" in drafts.page(other, file)


def test_numbers_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        drafts.main(["--drafts", "0"])
    assert "at least 1" in capsys.readouterr().err
