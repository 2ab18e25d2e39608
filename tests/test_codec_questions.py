"""What others want to know of a codec or a method they ask its base class: nothing outside its own
folder looks at its class."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pathlib

import pytest

import kvq_jax as kvq
from kvq_jax.arrays import (
    codebook_array,
    float_array,
    grouped_array,
    polar_array,
    slot_array,
    sparse_outliers,
)
from kvq_jax.codecs import bias_subtracting
from kvq_jax.codecs.codec import Codec
from kvq_jax.methods.base import Method

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("kvq_jax", "models/kvq_models", "kvq_tools", "benchmarks", "tools")
ARRAYS = (codebook_array, float_array, grouped_array, polar_array, slot_array, sparse_outliers)
ARRAY_ROOMS = (
    "kvq_jax/arrays",
    "kvq_jax/codecs",
    "kvq_jax/methods",
    "benchmarks",
)  # benchmarks fill arrays with random contents


def subclasses(kind: type) -> set[type]:
    return {kind for child in kind.__subclasses__() for kind in {child, *subclasses(child)}}


def folder(kind: type) -> str:
    return pathlib.Path(inspect.getfile(kind)).parent.relative_to(ROOT).as_posix()


def rooms() -> dict[str, tuple[str, ...]]:
    """Return the folders that may look at a class, by its name: its own for codecs and methods,
    more for what bodies hold."""
    assert len(kvq.methods.METHODS) > 10, "methods are registered"
    assert issubclass(bias_subtracting.BiasSubtracting, Codec)
    ours = {
        kind
        for kind in subclasses(Codec) | subclasses(Method)
        if kind.__module__.startswith("kvq_jax.")
    }
    values = {
        kind
        for module in ARRAYS
        for kind in vars(module).values()
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
    }
    arrays = {
        kind.__name__: ARRAY_ROOMS
        for kind in values
        if kind.__module__.startswith("kvq_jax.arrays.")
    }
    return {kind.__name__: (folder(kind),) for kind in ours} | arrays


def names(node: ast.AST) -> set[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def imported(tree: ast.Module) -> dict[str, str]:
    """Map what a module calls the names that it imports to these names, or to nothing where they
    come from another package than ours."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            ours = node.level or str(node.module).startswith("kvq_jax")
            found |= {
                alias.asname or alias.name: alias.name if ours else "" for alias in node.names
            }
    return found


def classes_tested(tree: ast.Module) -> set[str]:
    """Names in the class argument of isinstance and issubclass, beside a type(...) or __class__
    that is compared, and in class patterns."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and names(node.func) & {"isinstance", "issubclass"}
            and len(node.args) == 2
        ):
            found |= names(node.args[1])
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(
                (isinstance(s, ast.Call) and names(s.func) == {"type"}) or "__class__" in names(s)
                for s in sides
            ):
                found |= set().union(*map(names, sides))
        elif isinstance(node, ast.MatchClass):
            found |= names(node.cls)
    called = imported(tree)
    return {called.get(name, name) for name in found}


def violations(path: str, source: str, rooms: dict[str, tuple[str, ...]]) -> list[str]:
    tested = classes_tested(ast.parse(source)) & rooms.keys()
    return [
        f"{path} tests for {name}"
        for name in sorted(tested)
        if not any(path.startswith(f"{room}/") for room in rooms[name])
    ]


def test_no_file_outside_its_folder_tests_for_a_codec_or_method():
    known = rooms()
    assert {
        "DenseCodec",
        "GroupedCodec",
        "BiasSubtracting",
        "XCodec",
        "Dense",
        "TokenFormat",
        "CodebookArray",
    } <= known.keys()
    assert "Codec" not in known
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150, "the walk finds no sources"
    found = [
        line
        for path in files
        for line in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"), known)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvq_jax/cache/accounting.py", "exact = isinstance(codec, DenseCodec)"),
        (
            "benchmarks/gpu/run.py",
            "from kvq_jax.methods.dense import Dense as D\nisinstance(method, D)",
        ),
        ("kvq_jax/layer/plan.py", "if k.__class__ == BiasSubtracting: pass"),
        (
            "models/kvq_models/calibration/fit.py",
            "match codec:\n    case BiasSubtracting(inner=i): pass",
        ),
    ],
)
def test_a_test_for_a_class_is_found(path: str, source: str):
    assert violations(path, source, rooms())
