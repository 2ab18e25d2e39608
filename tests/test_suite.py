"""The suite's own behaviour: a stuck test is named with its stacks; programs are shared and
dropped; a run says what it held."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

import kvq_jax as kvq
from tests.exhaustive import some
from tests.methods_table import METHOD_CASES, ONE_OF_EACH, kind

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Callable[..., str]:
    """run(source, *arguments) -> what a run of the tests in `source` prints, with the project's
    settings."""

    def call(source: str, *arguments: str) -> str:
        (tmp_path / "test_some.py").write_text(textwrap.dedent(source))
        settings = [
            "-c",
            str(ROOT / "pyproject.toml"),
            f"--rootdir={tmp_path}",
            "-p",
            "no:cacheprovider",
        ]
        command = [sys.executable, "-m", "pytest", *settings, *arguments, str(tmp_path)]
        return subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        ).stdout

    return call


def test_a_stuck_test_ends_with_the_stacks_of_all_threads_and_the_others_still_run(run):
    printed = run(
        """
        import threading, time

        def a_waiting_thread():
            time.sleep(20)

        def test_stuck():
            threading.Thread(target=a_waiting_thread, daemon=True).start()
            time.sleep(20)

        def test_other():
            pass
        """,
        *("-n1", "--dist=worksteal", "-o", "faulthandler_timeout=2"),
    )
    assert "test_some.py::test_stuck" in printed.rpartition("FAILED")[2], printed
    assert "1 failed, 1 passed" in printed
    assert "in a_waiting_thread" in printed
    assert "in test_stuck" in printed


def test_programs_are_dropped_by_bytes_and_read_back_from_the_runs_cache(run):
    printed = run(
        """
        import jax
        from tests.worker_resources import Resources

        traced = []

        @jax.jit
        def program(x):
            traced.append(x)
            return x + 41

        def test_first(pytestconfig):
            program(1.0)
            plugins = pytestconfig.pluginmanager.get_plugins()
            (plugin,) = (p for p in plugins if isinstance(p, Resources))
            plugin.most = 0  # bytes: whatever this process holds is too much

        def test_second():
            program(1.0)
            assert len(traced) == 2, "kept, whatever the process holds"

        def test_third():
            program(1.0)
            assert len(traced) == 2, "dropped again, though little was added"
        """,
        *("-p", "tests.worker_resources", "-n1"),
    )
    assert "3 passed" in printed
    line = re.search(
        r"gw0: at most (\d\.\d\d) GiB; (\d+) programs, (\d+)% of them compiled before, dropped 1"
        r" times",
        printed,
    )
    assert line, printed
    assert 0.05 < float(line[1]) < 3
    assert int(line[2]) >= 2
    assert int(line[3]) >= 25


def test_every_method_has_a_row_that_slow_tests_run_by_default():
    def methods(rows) -> set[str]:
        return {kind(re.split("[:=]", row.spec)[0]) for row in rows}

    named = set(map(kind, kvq.methods.METHODS))
    assert named <= methods(ONE_OF_EACH), (
        f"{named - methods(ONE_OF_EACH)} runs with --exhaustive alone"
    )
    assert methods(METHOD_CASES) == methods(ONE_OF_EACH)
    assert len(ONE_OF_EACH) < len(METHOD_CASES) / 2, "slow tests run over almost everything"


def test_cases_that_are_not_usual_are_marked_whatever_their_values():
    marked = {
        param.values: [mark.name for mark in param.marks]
        for param in some([("a", 1), ("b", 2), "c"], [("a", 1)])
    }
    assert marked == {("a", 1): [], ("b", 2): ["exhaustive"], ("c",): ["exhaustive"]}
    with pytest.raises(AssertionError, match="are no cases"):
        some(["a"], ["b"])
