"""What `python -m benchmarks.hosts` counts, and what it says of hosts that are not there."""

import dataclasses
import pathlib

import numpy as np
import pytest

from benchmarks.hosts import __main__ as command
from benchmarks.hosts.host import body_lines, code_lines
from benchmarks.hosts.measured import compared
from benchmarks.hosts.report import HOSTS_OWN, Adapter, HostsReport, Step, page

TEXT = np.array([[1, 2], [3, 4]]), np.ones((2, 2, 8))


def test_tokens_are_counted_to_the_first_that_differs_and_errors_with_it():
    logits = np.random.default_rng(0).normal(size=(2, 4, 8))
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    same = compared("dense", (tokens, logits), (tokens, logits))
    assert (same.equal_tokens, same.tokens, same.error) == (8, 8, 0)
    other, moved = tokens.copy(), logits.copy()
    other[1, 1] = 0  # what follows comes from another text
    moved[1, 1:] = 2 * logits[1, 1:]
    moved[1, 2:] = 9 * logits[1, 2:]
    different = compared("kivi", (other, moved), (tokens, logits))
    assert (different.equal_tokens, different.tokens) == (5, 8)
    assert different.error == pytest.approx(1)


def test_lines_of_code_are_those_without_documentation():
    source = '"""A module\n\nof lines."""\n\n# a comment\nx = [\n    1,  # why\n]\n\n\n'
    source += 'def f():\n    """Return 1."""\n    return 1\n'
    assert code_lines(source) == {6, 7, 8, 11, 13}

    def lines(
        first: int,
        second: int,
    ) -> int:
        """Return a sum."""

        # of two
        both = first, second
        return sum(both)

    assert body_lines(lines) == 2


def test_a_host_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "MODULES", {"tunix": "no_such_host"})
    command.main([])
    assert "- tunix was not measured: No module named 'no_such_host'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--tokens", "1000"])
    assert "powers of two" in capsys.readouterr().err


def test_a_step_has_its_share_of_quantizing_a_block(tmp_path: pathlib.Path):
    base = Step("tunix", HOSTS_OWN, 4096, 2, 2**20, 0.0, 15 * (4.0,), 15 * (8.0,))
    packed = dataclasses.replace(base, cache="kivi:bits=4", wall_ms=14 * (2.0,) + (34.0,))
    assert packed.cycle.ageing == (14,)
    when = dict(command="c", date="", jax_version="", cpu="", cores=1, load=(0.1,), shapes="")
    shown = page(HostsReport(adapters=(), steps=(base, packed), missing={}, **when), tmp_path)
    assert "| tunix | 4096 | `kivi:bits=4` | 1.0 | 3.0 | 0.75 | 8.0 | 1.00 |" in shown
    assert "| tunix | 4096 | the host's own | 1.0 | 4.0 | 1.00 | 8.0 | 1.00 |" in shown


def test_rounds_without_a_whole_block_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["--rounds", "15"])
    assert "--rounds 15 must be a multiple of 32" in capsys.readouterr().err


def test_the_file_is_there_before_the_page_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "MODULES", {"tunix": "no_such_host"})
    monkeypatch.setattr(command, "page", lambda _, file: f"written: {file.exists()}")
    command.main(["--json", str(tmp_path / "hosts.json")])
    assert "written: True" in capsys.readouterr().out


def test_a_file_keeps_the_other_hosts_of_its_commit(tmp_path: pathlib.Path):
    def report(host: str, commit: str) -> HostsReport:
        adapter = Adapter(host, "1", 2, 1, (compared("dense", TEXT, TEXT),))
        step = Step(host, "dense", 64, 2, 100, 0.0, (1.0, 2.0), (1.0, 2.0))
        when = dict(command="python -m benchmarks.hosts", date="", jax_version="", commit=commit)
        what = dict(cpu="", cores=1, load=(0.1,), shapes="", missing={})
        return HostsReport(adapters=(adapter,), steps=(step,), **when, **what)

    file = tmp_path / "hosts.json"
    report("tunix", "1234567").write(file)
    both = command.kept(report("bonsai", "1234567"), file, ["bonsai"])
    assert [one.host for one in both.adapters] == ["bonsai", "tunix"]
    assert [one.host for one in both.steps] == ["bonsai", "tunix"]
    again = command.kept(dataclasses.replace(both, adapters=both.adapters[1:]), file, [])
    assert [one.host for one in again.adapters] == ["tunix"]
    assert len(command.kept(report("bonsai", "7654321"), file, []).adapters) == 1
