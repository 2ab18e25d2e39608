"""A few faults of each kind: kvq gives no wrong answer, and the harness would see one."""

import importlib
import json
import pathlib
import warnings

import pytest

from benchmarks.faults import live
from benchmarks.faults.kinds import CONTROLS, KINDS
from benchmarks.faults.outcome import Inject, Outcome
from benchmarks.faults.report import FaultRow
from tests.exhaustive import some

runner = importlib.import_module("benchmarks.faults.__main__")

STORED = [name for name, one in KINDS.items() if one.place == "stored:damage_of"]
SLOW = {"prompts", "tokenizers", "weights that kvq saved"}  # seconds for every injection
LIVE = [name for name, one in KINDS.items() if one.place.startswith("live:")]


def injected(inject: Inject, numbers: range, *, checked: bool) -> list[Outcome]:
    return [inject(number, checked) for number in numbers]


@pytest.mark.parametrize("name", sorted(set(STORED) - SLOW))
def test_damaged_files_give_no_wrong_answer(name: str, tmp_path: pathlib.Path):
    with KINDS[name].kind()(tmp_path) as inject:
        outcomes = injected(inject, range(4), checked=True)
        assert not [one for one in outcomes if one.bad]
        assert any(one.detected for one in outcomes)
        assert any(one.bad for one in injected(inject, range(30), checked=False)), "it sees nothing"


@pytest.mark.parametrize("name", some(LIVE, ["live caches, sealed bits", "prefixes in memory"]))
def test_faults_of_an_engine_give_no_wrong_answer(
    name: str, shallow: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live, "EMBEDDED", shallow)
    monkeypatch.setattr(live, "ROOM", 200_000)  # bytes: fewer layers take less
    with warnings.catch_warnings(), KINDS[name].kind()(tmp_path) as inject:
        outcomes = injected(inject, range(3), checked=True)
        if name != "live caches, any bit":  # of which some are newer than any seal
            assert not [one for one in outcomes if one.bad]
        if "clock" not in name and "any" not in name:
            assert all(one.detected for one in outcomes)
        assert any(inject(number, False).bad for number in range(30)), "it sees nothing"


def test_processes_that_die_or_say_nothing_are_outcomes_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    right = json.dumps([True, Outcome(True, "right")])
    control = json.dumps([False, Outcome(False, "wrong")])
    script = f"""
import os, sys, time
first = int(sys.argv[2])
print('["ready"]', flush=True)
if first == 0:
    print({right!r}, flush=True)
    os.kill(os.getpid(), 9)
if first == 2:
    time.sleep(60)
for _ in range(first, 4):
    print({right!r}, flush=True)
for _ in range(int(sys.argv[4])):
    print({control!r}, flush=True)
print('["done"]', flush=True)
"""
    monkeypatch.setattr(runner, "CHILD", ("-c", script))
    monkeypatch.setattr(runner, "HANG_SECONDS", 3)
    kept: list[FaultRow] = []
    row = runner.run_kind("plans", 4, FaultRow("plans"), kept.append)
    assert (row.tried, row.detected, row.recovered) == (4, 2, 2)
    assert (row.wrong, row.crash, row.hang) == (0, 1, 1)
    assert (row.controls, row.control) == (CONTROLS, CONTROLS)
    assert "ends with -9" in row.notes[0]
    assert kept[-1] == row


def test_compiled_programs_that_are_damaged_are_seen_and_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(runner, "CONTROLS", 1)
    row = runner.run_kind("compiled programs", 2, FaultRow("compiled programs"))
    assert (row.tried, row.detected, row.recovered) == (2, 2, 2), row
    assert row.control == row.controls == 1, "programs that are exchanged are not noticed"
