"""A profiler's trace reduced to microseconds for each kernel name, read by JAX alone: no
TensorBoard is needed."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

# names of planes, and of the lines in them that hold events. Other lines sum these up again.
DEVICE, STREAM = "/device:GPU", "Stream"
HOST, CLIENT = "/host:CPU", re.compile("tf_XLA.*Client|tf_XLAEigen")  # for a dry run on a CPU
NOT_WORK = re.compile(
    r"end: |ThreadpoolListener|\$|Thunk|ThunkExecutor|Execut|Wait|Tfrt|PjRt|CollectGarbage"
    r"|ParseArguments"
)


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """The runs of one kernel: how many, and their microseconds in all."""

    name: str
    runs: int
    us: float


def traced(call: Callable[[], Any]) -> tuple[KernelTime, ...]:
    """Return the kernels that a call runs, the longest first. It runs once."""
    with tempfile.TemporaryDirectory(prefix="kvq-trace") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("the profiler wrote no trace")
        return kernel_times(jax.profiler.ProfileData.from_file(str(files[-1])).planes)


def kernel_times(planes: Iterable[Any]) -> tuple[KernelTime, ...]:
    """Add up the events of each kernel's name over the streams of all GPUs, or over the CPU's
    threads if there is no GPU."""
    planes = list(planes)
    on_device = [
        line
        for plane in planes
        if plane.name.startswith(DEVICE)
        for line in plane.lines
        if line.name.startswith(STREAM)
    ]
    lines = on_device or [
        line
        for plane in planes
        if plane.name == HOST
        for line in plane.lines
        if CLIENT.match(line.name)
    ]
    runs, nanoseconds = collections.Counter[str](), collections.Counter[str]()
    for line in lines:
        for event in line.events:
            if on_device or not NOT_WORK.match(event.name):
                name = without_number(event.name)
                runs[name] += 1
                nanoseconds[name] += event.duration_ns
    kernels = (
        KernelTime(name, runs[name], round(total / 1e3, 3)) for name, total in nanoseconds.items()
    )
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.us, kernel.name)))


def without_number(name: str) -> str:
    """Drop the numbers by which XLA tells alike kernels apart: loop_add_fusion_12 and
    gemm_fusion_dot.7_0."""
    return re.sub(r"([._]\d+)+$", "", name) or name
