"""benchmarks/gpu/gpu.sh with an interpreter that only notes what it was asked for: stages, their limits, what a failure of one does."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "gpu" / "gpu.sh"
STAGES = ("-m pytest", "-m benchmarks.gpu.kernels", "-m benchmarks.gpu.decode_step")
# notes the platform and its arguments; ends with the status that the file `statuses` has for the n-th time that such a stage runs
STUB = """\
#!/usr/bin/env bash
here=$(dirname "$0")
echo "$JAX_PLATFORMS $*" >>"$here/calls"
seen=$(grep -c -- "$1 $2" "$here/calls")
exit "$(sed -n "s/^$1 $2 $seen //p" "$here/statuses" | grep . || echo 0)"
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="gpu.sh is a script for bash, which this machine lacks")


@dataclasses.dataclass(frozen=True)
class Run:
    """calls: (stage, arguments) in order, of which all must have been told to use CUDA."""

    status: int
    output: str
    log: str
    calls: list[tuple[str, str]]


def run(folder: pathlib.Path, statuses: str = "", **environment: str) -> Run:
    stub = folder / "python"
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    (folder / "statuses").write_text(statuses, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder / "results")],
        env=variables | {"PYTHON": str(stub), "NAME": "stub"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line.split(" ", 1) for line in (folder / "calls").read_text(encoding="utf-8").splitlines()]
    assert {platform for platform, _ in lines} == {"cuda"}, "a process without CUDA must fail, not skip"
    calls = [(stage, rest) for _, rest in lines for stage in STAGES if rest.startswith(stage)]
    return Run(done.returncode, done.stdout + done.stderr, (folder / "results" / "gpu_stub.log").read_text(encoding="utf-8"), calls)


def limits(log: str) -> dict[str, int]:
    return {title: int(seconds) for title, seconds in re.findall(r"^== (.+), at most (\d+) s:", log, re.MULTILINE)}


def test_all_stages_run_on_cuda_within_ten_minutes(tmp_path: pathlib.Path):
    found = run(tmp_path)
    assert found.status == 0, found.output
    assert [stage for stage, _ in found.calls] == list(STAGES)
    assert "== all stages passed" in found.log
    tests, kernels, steps = (arguments for _, arguments in found.calls)
    assert "-m gpu" in tests
    assert "-n 12" in tests
    folders = {
        "decode_attention": ("decode", "matvec"),
        "quantize": ("quantize",),
        "readers": ("codebook", "parts_of_groups", "polar"),
        "tiles": ("table_lookup",),
    }
    for folder, names in folders.items():
        for name in names:
            assert f"tests/pallas_kernels/{folder}/test_{name}.py" in tests
    assert f"--json {tmp_path}/results/kernels_stub.json" in kernels
    assert f"--json {tmp_path}/results/step_stub.json" in steps
    seconds = limits(found.log)
    assert seconds["gpu tests"] + seconds["kernels"] <= 580
    assert int(re.findall(r"--seconds (\d+)", kernels)[0]) < seconds["kernels"]
    assert int(re.findall(r"--seconds (\d+)", steps)[0]) < seconds["decode steps"] <= 580


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_does_not_stop_the_next_and_is_named(tmp_path: pathlib.Path, stage: str):
    found = run(tmp_path, f"{stage} 1 1\n")
    assert [name for name, _ in found.calls] == list(STAGES)
    assert found.status == 1
    title = {"-m pytest": "gpu tests", "-m benchmarks.gpu.kernels": "kernels", "-m benchmarks.gpu.decode_step": "decode steps"}[stage]
    assert f"== FAILED {title}: exit status 1\n" in found.log
    assert "all stages passed" not in found.log


def test_kernels_go_on_in_a_new_process_behind_a_crash(tmp_path: pathlib.Path):
    found = run(tmp_path, "-m benchmarks.gpu.kernels 1 3\n-m benchmarks.gpu.kernels 2 139\n")
    kernels = [arguments for stage, arguments in found.calls if stage == "-m benchmarks.gpu.kernels"]
    assert ["--resume" in arguments for arguments in kernels] == [False, True, True]
    assert found.calls[-1][0] == "-m benchmarks.gpu.decode_step"
    assert found.status == 1, "the crash is not forgotten"


def test_a_stage_without_time_is_a_failure(tmp_path: pathlib.Path):
    found = run(tmp_path, TOTAL="60")
    assert [stage for stage, _ in found.calls] == ["-m pytest", "-m benchmarks.gpu.decode_step"]
    assert found.status == 1
    assert "== FAILED kernels: no time left" in found.log
