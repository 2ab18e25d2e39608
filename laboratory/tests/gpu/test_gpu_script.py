"""benchmarks/gpu/gpu.sh with an interpreter that only notes what it was asked for: stages, their
limits, what a failure of one does."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks.gpu import decode_step, kernels, step_parity

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "gpu" / "gpu.sh"
FIRST = (
    "kernels --plan routes",
    "kernels --plan parity",
    "step_parity",
    "decode_step",
    "kernels --plan next",
)
TITLES = (
    "attention by both routes",
    "parity of kernels",
    "parity of steps",
    "steps of 8 layers",
    "more attention, quantizing",
)
# notes the platform and its arguments; ends with the status that the file `statuses` has for the
# n-th call
STUB = """\
#!/usr/bin/env bash
here=$(dirname "$0")
[ "$1" = -c ] && exit 0
echo "$JAX_PLATFORMS $*" >>"$here/calls"
exit "$(sed -n "s/^$(wc -l <"$here/calls" | tr -d ' ') //p" "$here/statuses" | grep . || echo 0)"
"""

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None, reason="gpu.sh is a script for bash, which this machine lacks"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """calls: the arguments of each stage in order. platforms: what each was told to run on."""

    status: int
    output: str
    log: str
    calls: list[str]
    platforms: set[str]


def run(folder: pathlib.Path, *arguments: str, statuses: str = "", **environment: str) -> Run:
    stub = folder / "python"
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    (folder / "statuses").write_text(statuses, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments, str(folder / "results")],
        env=variables | {"PYTHON": str(stub), "NAME": "stub"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    noted = folder / "calls"
    lines = [
        line.split(" ", 1)
        for line in (noted.read_text(encoding="utf-8") if noted.exists() else "").splitlines()
    ]
    calls = [rest.removeprefix("-m benchmarks.gpu.bare benchmarks.gpu.") for _, rest in lines]
    log = (folder / "results" / "gpu_stub.log").read_text(encoding="utf-8")
    return Run(
        done.returncode, done.stdout + done.stderr, log, calls, {platform for platform, _ in lines}
    )


def limits(log: str) -> dict[str, int]:
    return {
        title: int(seconds)
        for title, seconds in re.findall(r"^== (.+), at most (\d+) s:", log, re.MULTILINE)
    }


def order(found: Run) -> list[str]:
    return [next(stage for stage in FIRST if call.startswith(stage)) for call in found.calls]


def parsed(call: str) -> None:
    """Have the stage's own parser read its arguments: SystemExit where it does not know one."""
    name, *arguments = call.split()
    parsers = {
        "kernels": kernels.argument_parser,
        "step_parity": step_parity.argument_parser,
        "decode_step": decode_step.argument_parser,
    }
    parsers[name]().parse_args(arguments)


def test_the_stages_run_on_cuda_in_order_within_ten_minutes(tmp_path: pathlib.Path):
    found = run(tmp_path)
    assert found.status == 0, found.output
    assert order(found) == list(FIRST)
    assert found.platforms == {"cuda,cpu"}
    assert "== all stages passed" in found.log
    for call in found.calls:
        parsed(call)
    seconds = limits(found.log)
    assert tuple(seconds) == TITLES
    assert sum(seconds.values()) <= 580
    for call, limit in zip(found.calls, seconds.values(), strict=True):
        assert int(re.findall(r"--seconds (\d+)", call)[0]) < limit
    results = tmp_path / "results"
    files = [call.split("--json ")[1].split()[0] for call in found.calls]
    assert files == [
        f"{results}/{name}_stub.json"
        for name in ("kernels", "parity_kernels", "parity_steps", "step", "kernels")
    ]
    assert "--resume" in found.calls[-1], "it overwrites the first stage's rows"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_without_cuda_nothing_runs(tmp_path: pathlib.Path):
    """A stage would otherwise run on the CPU, and its numbers pass for a GPU's."""
    environment = os.environ | {"PYTHON": sys.executable, "NAME": "none"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "JAX finds no CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_second_run_adds_to_the_first_ones_rows_and_runs_the_tests(tmp_path: pathlib.Path):
    found = run(tmp_path, "--second")
    assert found.status == 0, found.output
    assert found.platforms == {"cuda,cpu"}
    assert sum(limits(found.log).values()) <= 580
    assert found.calls[0].startswith("kernels --plan second")
    assert "--resume" in found.calls[0]
    for call in found.calls[:-1]:
        parsed(call)
    tests = found.calls[-1]
    assert tests.startswith("-m pytest -m gpu")
    assert "--seconds" not in tests
    for name in ("decode_attention/test_decode", "quantize/test_append", "readers/test_polar"):
        assert f"tests/pallas_kernels/{name}.py" in tests


def test_kernels_go_on_in_a_new_process_behind_a_crash(tmp_path: pathlib.Path):
    found = run(tmp_path, statuses="1 3\n2 139\n")
    assert order(found) == [FIRST[0]] * 3 + list(FIRST[1:])
    assert ["--resume" in call for call in found.calls[:3]] == [False, True, True]
    assert found.status == 1, "the crash is not forgotten"


def test_the_dry_run_has_the_same_stages_on_a_cpu(tmp_path: pathlib.Path):
    found = run(tmp_path, "--dry-run")
    assert found.status == 0, found.output
    assert order(found) == list(FIRST)
    assert found.platforms == {"cpu"}
    for call in found.calls:
        parsed(call)
        assert "--tiny" in call or "--interpret" in call
