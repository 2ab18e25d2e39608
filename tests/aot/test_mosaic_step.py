"""The kernels of a step beside attention compile on Mosaic GPU without a GPU, update caches in
place, and keep their limits."""

import itertools
import pathlib
import subprocess
import sys

import pytest

from benchmarks.machine_code.mosaic_step import KERNELS
from benchmarks.machine_code.target import BY_NAME
from tests.exhaustive import some
from tests.pallas_kernels.lowering import needs_mosaic

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [kernel.name for kernel in KERNELS]
USUAL = [("append, innerq:bits=2", "h200"), ("append, polarquant", "h200"), ("merge", "a100")]


@needs_mosaic
@pytest.mark.parametrize(("name", "target"), some(itertools.product(NAMES, BY_NAME), USUAL))
def test_a_kernel_keeps_its_limits(name: str, target: str):
    """The command says which limits are broken. A process compiles for one GPU."""
    command = ["benchmarks.machine_code.mosaic_step", "--target", target, "--case", name]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {target} |" in done.stdout
