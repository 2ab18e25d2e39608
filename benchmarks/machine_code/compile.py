"""Compile a JAX function for a GPU that this machine does not have, and keep the PTX of its
kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from benchmarks.machine_code.target import Target
from benchmarks.machine_code.tools import cuda_plugin

# JAX's plugin refuses to load without cuDNN and a driver, but compiles without them
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

_OPTIONS: dict[str, Any] = {
    "xla_dump_emitter_re": "ptx",  # newer versions of XLA write PTX only when told to
    "xla_backend_optimization_level": 3,  # whatever XLA_FLAGS says
}

_MOSAIC_FOLDER = "MOSAIC_GPU_DUMP_TO"  # Mosaic GPU compiles its kernels by itself, and dumps them

_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")
_THREADS = re.compile(r"\.(?:req|max)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")
_LAUNCH = re.compile(r"(\S+) grid: \[[^\]]*\] threads: \[[^\]]*\]\s+shared_memory: (\d+) bytes")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel before ptxas.

    threads: threads of a block.
    shared_bytes: bytes asked for at the launch, beside the code's own.
    """

    name: str
    ptx: str
    threads: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled jitted function.

    compiled: has `memory_analysis()` and, as `as_text()`, the optimized HLO. It cannot be run.
    thunks: XLA's list of launches, one line for each.
    captured: the same with command buffers, which launch their contents.
    """

    compiled: jax.stages.Compiled
    kernels: dict[str, Kernel]
    thunks: str
    captured: str

    def kernel(self, pattern: str) -> Kernel:
        """Return the one kernel whose whole name matches the regular expression. Raises ValueError
        if there is none or more than one."""
        matching = [
            kernel for name, kernel in sorted(self.kernels.items()) if re.fullmatch(pattern, name)
        ]
        if len(matching) != 1:
            raise ValueError(
                f"{pattern=} matches {[k.name for k in matching]} of the kernels"
                f" {sorted(self.kernels)}: one match is needed"
            )
        return matching[0]


@dataclasses.dataclass(frozen=True)
class AbsentGpu(AbstractDevice):
    """A GPU that is not there, with the compute capability for which Mosaic GPU compiles. JAX's own
    abstract devices have none, and stand for 9.0."""

    compute_capability: str = "9.0"

    @classmethod
    def of(cls, target: Target) -> AbsentGpu:
        capability = "{}.{}".format(*target.capability)
        return cls(target.device_kind, None, "gpu", compute_capability=capability)


def mesh_of(target: Target, sizes: dict[str, int]) -> Mesh:
    """Return a mesh of GPUs of one host that this machine does not have, with axes of these names
    and sizes."""
    devices = np.array(_devices(target, math.prod(sizes.values()))).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def compile_for(
    target: Target, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Program:
    """Return the program of `function` on a `target`. Nothing is run.

    If any argument lies on a mesh (`mesh_of`), all must. Otherwise they go to one device.

    Args:
        target: the GPU.
        function: plain, or jitted (its donations and static arguments are kept).
        arguments: trees of jax.ShapeDtypeStruct.

    Raises RuntimeError if JAX's CUDA plugin is missing or XLA wrote no PTX.
    """
    if all(getattr(x, "sharding", None) is None for x in jax.tree.leaves(arguments)):
        sharding = NamedSharding(mesh_of(target, {"device": 1}), PartitionSpec())
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    # newer versions of JAX choose a kernel's lowering by the device that the ambient mesh names,
    # and deprecate the Triton route
    mesh = AbstractMesh((), (), abstract_device=AbsentGpu.of(target))
    with tempfile.TemporaryDirectory(prefix="machine_code") as folder, _mosaic_dump() as mosaic:
        with use_abstract_mesh(mesh), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Triton", category=DeprecationWarning)
            lowered = jitted.lower(*arguments)
        compiled = lowered.compile({"xla_dump_to": folder, **_OPTIONS})
        kernels, thunks, captured = _read_dump(pathlib.Path(folder))
        kernels |= _read_mosaic_dump(mosaic)
    if not kernels:
        raise RuntimeError(
            "XLA wrote no PTX of a kernel that is launched: is a compilation cache switched on"
            " (jax_compilation_cache_dir)?"
        )
    return Program(compiled, kernels, thunks, captured)


def _devices(target: Target, number: int) -> list[Any]:
    """Return devices of this kind, of one host."""
    plugin = cuda_plugin()
    os.environ.setdefault(_SKIP_CHECK, "1")
    try:
        topology = _topology(target, number)
    except (
        NotImplementedError
    ):  # JAX looked for its plugins before, without the variable: load this one now
        importlib.import_module(plugin).initialize()
        topology = _topology(target, number)
    return list(topology.devices)


def _topology(target: Target, number: int) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        target.name, "cuda", target_config=target.config, topology=f"1x1x{number}"
    )


@contextlib.contextmanager
def _mosaic_dump() -> Iterator[pathlib.Path]:
    """Let Mosaic GPU dump what it lowers and compiles to a new folder."""
    before = os.environ.get(_MOSAIC_FOLDER)
    with tempfile.TemporaryDirectory(prefix="machine_code") as folder:
        os.environ[_MOSAIC_FOLDER] = folder
        try:
            yield pathlib.Path(folder)
        finally:
            os.environ.pop(_MOSAIC_FOLDER)
            if before is not None:
                os.environ[_MOSAIC_FOLDER] = before


def _read_mosaic_dump(folder: pathlib.Path) -> dict[str, Kernel]:
    """Return the kernels that Mosaic GPU compiled. Each has files of its own: PTX, and what the
    kernel asks for."""
    kernels = {}
    for file in sorted(folder.glob("*.ptx")):
        ptx = file.read_text(encoding="utf-8")
        resources = _resources(file).read_text(encoding="utf-8")
        shared, entry = _SHARED.search(resources), _ENTRY.search(ptx)
        if shared is None or entry is None:
            raise RuntimeError(
                f"{file.name} has no entry, or no shared memory is written beside it"
            )
        name, threads = entry.group(1), _threads(ptx, entry.end())
        kernels[name] = Kernel(name, ptx, threads, int(shared.group(1)))
    return kernels


def _resources(ptx: pathlib.Path) -> pathlib.Path:
    """Return the file of resources beside a kernel's PTX. JAX numbers both by themselves: kernels
    that it has compiled before have resources alone, and the numbers differ from there on."""
    same = ptx.with_suffix(".resources.txt")
    name = re.sub(r"_\d+$", "", ptx.stem)
    others = [
        file
        for file in sorted(ptx.parent.glob("*.resources.txt"))
        if re.fullmatch(re.escape(name) + r"_\d+\.resources\.txt", file.name)
    ]
    if not same.exists() and len(others) == 1:
        return others[0]
    return same


def _threads(ptx: str, entry: int) -> int:
    """Return the threads of a block of the kernel whose name ends at `entry`."""
    threads = _THREADS.search(ptx, entry, ptx.index("{", entry))
    if threads is None:
        raise RuntimeError("the PTX of a kernel does not say how many threads a block has")
    return math.prod(int(n) for n in threads.groups() if n)


def _read_dump(folder: pathlib.Path) -> tuple[dict[str, Kernel], str, str]:
    """Return the kernels that are launched, the list of launches, and that with command buffers,
    from what XLA left in a folder."""
    lists = {
        file.name: file.read_text(encoding="utf-8") for file in folder.glob("*thunk_sequence*.txt")
    }
    launches = {name: int(size) for text in lists.values() for name, size in _LAUNCH.findall(text)}
    kernels = {}
    for file in sorted(folder.glob("*.ptx")):
        ptx = file.read_text(encoding="utf-8")
        for entry in _ENTRY.finditer(ptx):
            if (name := entry.group(1)) not in launches:
                continue
            kernels[name] = Kernel(name, ptx, _threads(ptx, entry.end()), launches[name])

    def ending(text: str) -> str:
        return next((content for name, content in sorted(lists.items()) if name.endswith(text)), "")

    return kernels, ending("thunk_sequence.txt"), ending("thunk_sequence_after_thunk_passes.txt")
