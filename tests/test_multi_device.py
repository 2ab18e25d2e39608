"""The tests of several devices, in a process of their own: 8 virtual CPU devices must be asked for before JAX starts."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 8

# Its programs are compiled once each, so none is kept on disk; and the other tests check the types of all that runs there but placements.
OPTIONS = ("-q", "-n", "0", "-p", "no:cacheprovider", "--jaxtyping-packages=kvq_jax.placement,tests.type_checker.checked")
QUICKER = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def test_on_eight_virtual_devices(pytestconfig):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES} --xla_cpu_parallel_codegen_split_count=1"
    command = [sys.executable, "-m", "pytest", *OPTIONS, "tests/multi_device"]
    command += ["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []
    environment = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"} | QUICKER
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 30, done.stdout[-500:]
