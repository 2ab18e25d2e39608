"""The soak goes on where it was stopped, and sees where a used cache is not what a new one is."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from laboratory import results_page, soak

SPEC = "kivi:bits=2,group_size=8,recent=4,block=8"


@pytest.fixture
def small(model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs the soak for some steps in one folder, in rounds of 2 segments of
    12 steps."""
    for name, value in {
        "SEGMENT": 12,
        "SEGMENTS": 2,
        "ROUNDS": 1,
        "CAPACITY": 40,
        "PROMPT": 16,
    }.items():
        monkeypatch.setattr(soak, name, value)

    def run(steps: int) -> soak.SoakReport:
        work = ["--model", str(model), "--cache", SPEC, "--work", str(tmp_path / "work")]
        soak.main([*work, "--steps", str(steps), "--json", str(tmp_path / "soak.json")])
        return soak.SoakReport.read(tmp_path / "soak.json")

    return run


def test_a_soak_goes_on_where_it_was_stopped_and_its_page_tells_so(small, tmp_path):
    first = small(48)
    assert [(s.steps, s.process, s.checked) for s in first.samples] == [(24, 0, 1), (48, 0, 2)]
    both = small(72)
    assert both.samples[:2] == first.samples
    assert [(s.steps, s.trims, s.process, s.checked) for s in both.samples[2:]] == [(72, 12, 1, 3)]
    assert all(
        s.different == () and s.resident_bytes > 2**20 and s.programs > 0 for s in both.samples
    )
    text = results_page.render(tmp_path)["soak.md"]
    assert "All logits of these rounds were equal, bit for bit." in text
    assert "| 72 | 12 | 1 |" in text


def test_a_cache_that_is_not_what_a_new_one_is_is_named(small, model, tmp_path, monkeypatch):
    own = soak.Soak(str(model), [SPEC])
    digests, cache = own.round(3, 0, own.new(0))
    assert own.compare(3, 0, digests) == ""
    assert own.compare(4, 0, digests).endswith("the prompt"), (
        "the tokens of another round would pass"
    )
    real = soak.prefill

    def stale(llama, cache, tokens, lengths):
        """Leave keys that are off by a bit or two, as a cache might that was used before."""
        logits, cache = real(llama, cache, tokens, lengths)
        state = cache.layers[0]
        ring = (state.ring[0] * (1 + 2**-20), state.ring[1])
        return logits, dataclasses.replace(
            cache, layers=(dataclasses.replace(state, ring=ring), *cache.layers[1:])
        )

    monkeypatch.setattr(soak, "prefill", stale)
    assert own.compare(3, 0, digests) == f"round 3, {own.specs[0]}: segment 1"


def test_a_digest_sees_every_entry():
    logits = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    found = int(soak.digest_of(jax.numpy.asarray(logits)))
    for index in np.ndindex(*logits.shape):
        changed = logits.copy()
        changed[index] = np.nextafter(changed[index], np.float32(np.inf))
        assert int(soak.digest_of(jax.numpy.asarray(changed))) != found, index


def test_a_folder_of_another_run_is_refused(small, tmp_path, monkeypatch, capsys):
    small(24)
    monkeypatch.setattr(soak, "CAPACITY", 41)
    with pytest.raises(SystemExit) as stop:
        small(48)
    assert stop.value.code == 2
    assert "holds rows of another run (capacity)" in capsys.readouterr().err


def test_a_soak_of_no_steps_is_refused(small, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        small(0)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "--steps must be at least 1\n"
    assert not list(tmp_path.iterdir()), "something was written"
