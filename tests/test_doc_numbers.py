"""Counts and defaults that the documents tell are those of the code."""

import argparse
import pathlib
import re
from collections.abc import Iterator

import pytest

from kvq_tools.cli.main import build_parser

ROOT = pathlib.Path(__file__).parents[1]
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
NUMBERS = {word: count for count, word in enumerate(WORDS.split(), 1)}


def page(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8"))


def options(command: str) -> Iterator[argparse.Action]:
    for action in build_parser(command)._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices[command]._actions


def option(command: str, name: str) -> argparse.Action:
    return next(action for action in options(command) if name in action.option_strings)


@pytest.mark.parametrize(
    ("file", "sentence", "commands"),
    [
        ("docs/commands.md", r"`niah` has RULER's (\w+) tasks", ["niah"]),
        ("docs/commands.md", r"`ruler` has its (\w+) others", ["ruler"]),
        ("docs/evaluation.md", r"the (\w+) tasks of RULER", ["niah", "ruler"]),
    ],
)
def test_the_tasks_of_ruler_are_counted(file: str, sentence: str, commands: list[str]):
    said = re.search(sentence, page(file))
    assert said, f"{file} no longer says {sentence!r}"
    tasks = [option(command, "--task").choices or () for command in commands]
    assert NUMBERS[said[1]] == sum(len(list(kinds)) for kinds in tasks)


def test_the_papers_of_the_readme_are_counted():
    papers = set(re.findall(r"arxiv\.org/abs/([\d.]+)", page("docs/methods.md")))
    said_in_readme = re.findall(r"methods of (\w+) papers", page("README.md"))
    assert said_in_readme
    for said in said_in_readme:
        assert NUMBERS[said] == len(papers), papers


def test_the_defaults_of_serving_are_those_of_the_command():
    said = re.findall(r"`(--[\w-]+)` \((\d+ ?(?:[MG]iB)?)[;)]", page("docs/serving.md"))
    assert len(said) >= 4, said
    for name, value in said:
        action = option("serve", name)
        value = value.replace(" ", "")
        told = f"default: {value}" in " ".join((action.help or "").split())
        assert told or str(action.default) == value, f"{name}: {action.help}"
