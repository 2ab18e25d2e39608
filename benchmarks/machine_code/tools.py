"""Find the packages of the extra `aot`. One error names all missing ones."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_INSTALL = 'pip install "kvq-jax[aot]" (the extra `aot`)'


def find_tool(name: str) -> pathlib.Path:
    """Find `ptxas` or `nvdisasm`: in NVIDIA's Python packages, whose versions are known, or else on
    PATH. Raises RuntimeError if absent."""
    nvidia = _spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        if place := sorted(pathlib.Path(folder).glob(f"*/bin/{name}")):
            return place[-1]
    if place := shutil.which(name):
        return pathlib.Path(place)
    raise RuntimeError(f"{name} is missing: {_INSTALL}")


def cuda_plugin() -> str:
    """Return the module of JAX's CUDA plugin, which compiles without a GPU too. Raises RuntimeError
    if there is none."""
    for name in CUDA_PLUGINS:
        if _spec(name):
            return name
    raise RuntimeError(f"JAX's CUDA plugin is missing: {_INSTALL}")


def missing() -> str:
    """Return the error that names what this package needs and is not installed, or ""."""
    try:
        cuda_plugin()
        for name in ("ptxas", "nvdisasm"):
            find_tool(name)
    except RuntimeError as error:
        return str(error)
    return ""


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end. Raises RuntimeError with its output if it fails."""
    done = subprocess.run([str(find_tool(name)), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{name} {' '.join(arguments)} failed: {(done.stderr or done.stdout)[:2000]}"
        )
    return done


@functools.cache
def ptxas_version() -> str:
    """Return ptxas's version, such as "13.5.37": counts of instructions move with it."""
    said = run_tool("ptxas", "--version").stdout
    version = re.search(r"\bV([\d.]+)", said)
    return version.group(1) if version else said.strip().splitlines()[-1]


def _spec(module: str):
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is not there
        return None
