"""Caches that `kvq plan` chose, under short names: their specs list the widths of every layer."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

FILE = pathlib.Path(__file__).with_name("plans.json")
MARK = ":plan="  # in a name, such as waterfill:plan=2.25,key_basis=eigen


class MadePlan(NamedTuple):
    """A cache for a budget of stored bits, and its KL in nats per token: what the planner predicted
    and what it measured on other windows of the same text."""

    spec: str
    predicted: float
    measured: float


@functools.cache
def made_for(model: str) -> Mapping[str, MadePlan]:
    """Return the plans that were made for a model, by their names."""
    made = json.loads(FILE.read_text(encoding="utf-8"))["plans"]
    return {name: MadePlan(**plan) for name, plan in made.get(model, {}).items()}


def spec_of(cache: str, model: str) -> str:
    """Return the spec that a cache's name stands for: of a plan, or of any other cache the name
    itself. Raises ValueError if no such plan was made for the model."""
    if MARK not in cache:
        return cache
    plans = made_for(model)
    if cache not in plans:
        names = ", ".join(plans) or "none"
        raise ValueError(f"{FILE.name} has no plan {cache!r} for {model}; it has {names}")
    return plans[cache].spec
