"""Imports run one way: benchmarks, tests -> models -> kvq_jax -> pallas_kernels -> jax; and the command line is the top of models."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "kvq_jax": {"kvq_jax", "pallas_kernels"},
    "models": {"models", "kvq_jax"},
    "benchmarks": {"benchmarks", "models", "kvq_jax", "pallas_kernels"},
    "tests": {"tests", "benchmarks", "models", "kvq_jax", "pallas_kernels"},
}
KERNEL_DOOR = ("kvq_jax", "attention")  # the only folder of kvq_jax that knows the kernels
HEAVY = {"torch", "transformers"}  # never needed to import the cache or the kernels


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    """Dotted names that a module imports, anywhere in it; relative imports are resolved against its package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found.add(".".join(part for part in (base, node.module) if part))
    return found


def violations(path: pathlib.Path, source: str) -> list[str]:
    """Imports of the file `path` (relative to the project) that run the wrong way."""
    own, found = path.parts[0], []
    for name in sorted(imported(source, path.parts[:-1])):
        top = name.split(".")[0]
        wrong_way = top in ALLOWED and top not in ALLOWED[own]
        past_the_door = top == "pallas_kernels" and own == "kvq_jax" and path.parts[: len(KERNEL_DOOR)] != KERNEL_DOOR
        from_the_top = own == "models" and path.parts[1] != "cli" and f"{name}.".startswith("models.cli.")
        heavy = top in HEAVY and own in ("kvq_jax", "pallas_kernels")
        if wrong_way or past_the_door or from_the_top or heavy:
            found.append(f"{path} imports {name}")
    return found


def test_imports_run_one_way():
    files = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 20, "the walk finds no sources"
    found = [line for path in files for line in violations(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvq_jax/cache.py", "from models.config import LlamaConfig"),
        ("kvq_jax/cache.py", "import pallas_kernels.flash_decode"),
        ("pallas_kernels/flash.py", "def f():\n    import kvq_jax"),
        ("models/llama.py", "from pallas_kernels import launch"),
        ("models/llama.py", "import benchmarks.attention as a"),
        ("models/report/collect.py", "from models.cli.memory import parameter_bytes"),
        ("kvq_jax/methods/kivi/method.py", "import torch"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str):
    assert violations(pathlib.Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvq_jax/attention/dispatch.py", "import pallas_kernels.flash_decode"),
        ("models/llama.py", "from kvq_jax.cache import Cache"),
        ("models/cli/eval.py", "from models.cli import inputs"),
    ],
)
def test_a_right_import_passes(path: str, source: str):
    assert not violations(pathlib.Path(path), source)
