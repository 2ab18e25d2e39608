"""The tests of several devices, in a process of their own: 8 virtual CPU devices must be asked for
before JAX starts."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DEVICES, FOLDER = 8, "tests/multi_device"
PARTS = {  # which two workers run side by side: (files, at least how many tests)
    "layers": ("layers windowed_layers", 28),
    "models": ("models layer_plans commands engine refusals", 30),
}

# Its programs are compiled once each, so none is kept on disk; and the other tests check the types
# of all that runs there but placements.
CHECKED = "--jaxtyping-packages=kvq_jax.placement,tests.type_checker.checked"
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", CHECKED)
QUICKER = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def test_every_file_is_in_a_part():
    named = [f"test_{name}.py" for names, _ in PARTS.values() for name in names.split()]
    assert sorted(named) == sorted(p.name for p in (ROOT / FOLDER).glob("test_*.py"))


@pytest.mark.parametrize("part", PARTS)
def test_on_eight_virtual_devices(part, pytestconfig):
    names, fewest = PARTS[part]
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    files = [f"{FOLDER}/test_{name}.py" for name in names.split()]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *files]
    command += ["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []
    environment = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"} | QUICKER
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= fewest, done.stdout[-500:]
