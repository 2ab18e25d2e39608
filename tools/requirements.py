"""Print what an environment of the Makefile installs, one requirement a line, from pyproject.toml.

    python -m tools.requirements {docs,hosts,lowest}

docs: what builds the documentation. hosts: what kvq_jax needs, and the projects of tests/kvq_hosts.
lowest: the oldest versions that pyproject.toml allows, and what runs the tests.
"""

from __future__ import annotations

import argparse
import pathlib
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

PROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
ENVIRONMENTS = ("docs", "hosts", "lowest")
TESTED_EXTRAS = ("models", "tools", "serve", "report", "sentencepiece")


def requirements(environment: str, project: dict[str, Any]) -> list[str]:
    """Return the requirements of one of ENVIRONMENTS.

    Args:
        environment: its name.
        project: the table [project] of pyproject.toml.
    """
    installed, extras = project["dependencies"], project["optional-dependencies"]
    if environment == "docs":
        return extras["docs"]
    if environment == "hosts":
        return [*installed, *extras["hosts"]]
    used = [*installed, *(line for name in TESTED_EXTRAS for line in extras[name])]
    # the first of the extra `test` is kvq itself
    return [*_oldest(line for line in used if not line.startswith("kvq-jax")), *extras["test"][1:]]


def _oldest(lines: Iterable[str]) -> Iterable[str]:
    """Pin each package to its lower bound. An extra's bound replaces the library's."""
    bounds = dict(line.split(">=", 1) for line in lines)
    return (f"{name}=={bound}" for name, bound in bounds.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the requirements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=ENVIRONMENTS)
    chosen = parser.parse_args(argv).environment
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    print("\n".join(requirements(chosen, project)))


if __name__ == "__main__":
    main()
