"""Every module of the laboratory imports, and the command of every result's page parses. That is
all that the suite asks of it."""

import argparse
import importlib
import importlib.util
import pathlib
import re
import shlex
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = (file.relative_to(ROOT) for file in (ROOT / "laboratory").rglob("*.py"))
MODULES = sorted(
    ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
    if "tests" not in file.parts
)
PAGES = sorted(file.with_suffix(".md") for file in (ROOT / "laboratory/results").glob("*.json"))
COMMAND = re.compile(r"^`python -m ([\w.]+) ([^`]+)` ", re.MULTILINE)  # of the page's first line


class Parsed(Exception):
    """Ends a program when its command has parsed."""


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports(module: str):
    importlib.import_module(module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_of_a_page_parses(page: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    command = COMMAND.search(page.read_text(encoding="utf-8"))
    assert command, "the page begins with no command"
    module, words = command.groups()
    spec = importlib.util.find_spec(module)
    assert spec, f"{module} is gone: name what took its place in laboratory/results_page.py, MOVED"
    whole = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        whole(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    program = f"{module}.__main__" if spec.submodule_search_locations else module
    with pytest.raises(Parsed):
        importlib.import_module(program).main(shlex.split(words))
