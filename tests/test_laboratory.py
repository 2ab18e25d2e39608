"""Every module of the laboratory imports, which is all that the suite asks of it."""

import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = (file.relative_to(ROOT) for file in (ROOT / "laboratory").rglob("*.py"))
MODULES = sorted(
    ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
    if "tests" not in file.parts
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports(module: str):
    importlib.import_module(module)
