"""The soak of the server goes on where it was stopped, and sees an answer that is not the one its
request gets alone."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from laboratory import results_page, serving_soak

SIZES = {"SLOTS": 2, "CAPACITY": 64, "PROMPT": 20, "NEW": 8, "POOL": 6, "ROUND": 20, "LEAVES": 5}
SPEC = "kivi:bits=2,group_size=8,recent=4,block=8"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(serving_soak, name, value)


def test_a_soak_goes_on_where_it_was_stopped_and_its_page_tells_so(
    small, model: pathlib.Path, tmp_path: pathlib.Path
):
    file = tmp_path / "serving_soak.json"

    def run(requests: int) -> serving_soak.ServingSoakReport:
        where = ["--json", str(file), "--work", str(tmp_path / "work")]
        serving_soak.main(
            ["--model", str(model), "--cache", SPEC, "--requests", str(requests), *where]
        )
        return serving_soak.ServingSoakReport.read(file)

    first = run(40)
    assert [(s.requests, s.process, s.compiled, s.different) for s in first.samples] == [
        (20, 0, 0, ()),
        (40, 0, 0, ()),
    ]
    assert 0 < first.samples[-1].left < 40
    both = run(50)
    assert both.samples[:2] == first.samples
    assert [(s.requests, s.process, s.compiled, s.different) for s in both.samples[2:]] == [
        (50, 1, 0, ())
    ]
    assert both.samples[2].new_tokens > both.samples[1].new_tokens
    text = results_page.render(tmp_path)["serving_soak.md"]
    assert "Every answer was the one that its request gets alone" in text
    assert "| 50 |" in text


def test_another_answer_is_named(small, model: pathlib.Path):
    soak = serving_soak.ServingSoak(str(model), SPEC)
    assert soak.round(0, 20)[2] == []
    token, logprob = soak.alone[0][0]
    soak.alone[0][0] = token, float(np.nextafter(np.float32(logprob), np.float32(1)))
    chosen = np.random.default_rng(0).integers(0, SIZES["POOL"], 20).tolist()
    assert soak.round(0, 20)[2] == [number for number, i in enumerate(chosen) if i == 0] != []
