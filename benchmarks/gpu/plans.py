"""The cases of the kernel benchmark, and the order in which its stages take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.cpu.timing import Shape
from benchmarks.gpu.attention_candidates import (
    FIRST_SPECS,
    MODELS,
    MORE_SPECS,
    SPECS,
    Planned,
    attention_tasks,
    shape_of,
)
from benchmarks.gpu.quantize_candidates import quantize_tasks
from pallas_kernels.launch import Launch
from pallas_kernels.mosaic import route

MAIN = "Llama-3.1-8B"
PARITY_SPECS = (
    *FIRST_SPECS,
    "kivi:bits=3",
    "innerq:bits=2,mode=asym",
    "innerq:bits=3,mode=sym",
    "innerq:bits=4",
    "innerq:bits=8,mode=asym",
)
ROUTE_SPECS = (
    *("kivi:bits=4", "kivi:bits=2", "dense", "innerq:bits=2", "innerq:bits=1,mode=sym"),
    *("kivi:bits=4,pre_rope=true", "nf4", "polarquant", "waterfill:bits=2.5"),
    *("waterfill:bits=2.5,key_basis=eigen", "kvquant:bits=4,outliers=0.01"),
)
LENGTHS = tuple(512 << i for i in range(9))  # 512 .. 131072
BATCHES = (1, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """All candidates of a section at one shape.

    both: time both arithmetics, unless the command line chooses.
    routes: time Mosaic GPU beside Triton's assembly, if this JAX has it.
    specs: caches that are attended to, unless the command line chooses.
    brief: leave out most of others' candidates.
    """

    section: str
    model: str
    shape: Shape
    both: bool = False
    routes: bool = False
    specs: tuple[str, ...] = SPECS
    brief: bool = False

    @property
    def tiny(self) -> Case:
        """Return the same case at a shape that takes no time."""
        return self.cut(256)

    def cut(self, tokens: int) -> Case:
        """Return the same case with few heads of 64 channels, and `tokens`."""
        shape = Shape(min(2, self.shape.batch), tokens, 64, 2, min(2, self.shape.group))
        return dataclasses.replace(self, shape=shape)

    @property
    def name(self) -> str:
        caches = "" if self.specs == SPECS else f", {' '.join(self.specs)}"
        return (
            f"{self.section}, {self.model}, {self.shape.tokens} tokens, batch"
            f" {self.shape.batch}{caches}"
        )

    @property
    def launches(self) -> list[Launch]:
        """Return the options of kernels that are timed."""
        others = [Launch("jnp")] if self.both else []
        if self.routes and route.missing() is None:
            others.append(Launch("asm", route="mosaic"))
        return [Launch("asm"), *others]

    def tasks(self, launches: Sequence[Launch], specs: Sequence[str]) -> list[Planned]:
        if self.section == "attention":
            return attention_tasks(self.shape, launches, specs or self.specs, brief=self.brief)
        return quantize_tasks(self.shape, launches)


class Plans(NamedTuple):
    """The cases that a command offers.

    stages: cases by the name of a plan.
    of_shape: cases of (model, tokens, batch).
    """

    sections: tuple[str, ...]
    stages: Mapping[str, Callable[[], list[Case]]]
    of_shape: Callable[[str, int, int], list[Case]]

    def planned(self, plan: str) -> list[Case]:
        """Return the cases of a plan, each once."""
        first: dict[str, Case] = {}
        for case in self.stages[plan]():
            first.setdefault(case.name, case)
        return list(first.values())

    def chosen(self, shapes: Sequence[str], sections: Sequence[str], plan: str) -> list[Case]:
        """Return the cases of a plan, or the cases of MODEL:TOKENS:BATCH if shapes are given.

        Raises ValueError naming an unknown part.
        """
        if not shapes:
            return [case for case in self.planned(plan) if case.section in sections]
        cases = [case for text in shapes for case in self.of_shape(*_parsed(text))]
        return [case for case in cases if case.section in sections]


def _parsed(text: str) -> tuple[str, int, int]:
    model, *numbers = text.split(":")
    if model not in MODELS or len(numbers) != 2 or not all(n.isdigit() and int(n) for n in numbers):
        raise ValueError(f"shape {text!r}: write MODEL:TOKENS:BATCH; models: {', '.join(MODELS)}")
    return model, int(numbers[0]), int(numbers[1])


def _attention(model: str, *points: tuple[int, int], **fields: Any) -> list[Case]:
    return [
        Case("attention", model, shape_of(model, tokens, batch), **fields)
        for tokens, batch in points
    ]


def route_cases() -> list[Case]:
    """Return the cases that every run must have: 32K tokens x 16 of Llama 3.1 8B, by both routes to
    a GPU, for one cache of each form of bodies."""
    return _attention(MAIN, (32768, 16), routes=True, specs=ROUTE_SPECS, brief=True)


def parity_cases() -> list[Case]:
    """Return small shapes, for their errors and not their times."""
    cases = _attention(MAIN, (1024, 2), both=True, specs=PARITY_SPECS, brief=True)
    cases += _attention("Llama-3.2-1B", (1024, 2), both=True, specs=FIRST_SPECS, brief=True)
    return [*cases, Case("quantize", MAIN, shape_of(MAIN, 1024, 1), both=True)]


def next_cases() -> list[Case]:
    """Return the cases that follow in the same ten minutes: other lengths and batches, and
    quantizing."""
    points = ((131072, 1), (4096, 16), (32768, 1))
    cases = _attention(MAIN, *points, routes=True, specs=FIRST_SPECS, brief=True)
    return [*cases, Case("quantize", MAIN, shape_of(MAIN, 32768, 1))]


def second_cases() -> list[Case]:
    """Return every shape of the table, MODELS x LENGTHS x BATCHES, by weight.

    They need a run of their own because tables, polar keys and outliers take minutes to compile.
    Llama 3.1 8B comes first, and of it the points that show most.
    """
    every = [(tokens, batch) for tokens in LENGTHS for batch in BATCHES]
    cases = _attention(
        MAIN, (32768, 16), (131072, 1), (4096, 16), (32768, 1), (4096, 1), (131072, 16)
    )
    cases += _attention(MAIN, (32768, 16), both=True, specs=MORE_SPECS)
    others = [model for model in MODELS if model != MAIN]
    for model in others:
        cases += _attention(model, (32768, 16), (32768, 1))
    cases += _attention(MAIN, *every)
    cases += [Case("quantize", MAIN, shape_of(MAIN, tokens, 1)) for tokens in (131072, 4096, 512)]
    for points in ((4096, 16), (4096, 1), (131072, 1), (131072, 16)), every:
        for model in others:
            cases += _attention(model, *points)
    return cases


def _of_shape(model: str, tokens: int, batch: int) -> list[Case]:
    shape = shape_of(model, tokens, batch)
    return [
        Case("attention", model, shape, both=True),
        Case("quantize", model, shape_of(model, tokens, 1)),
    ]


PLANS = Plans(
    ("attention", "quantize"),
    {
        "routes": route_cases,
        "parity": parity_cases,
        "next": next_cases,
        "second": second_cases,
        "all": lambda: route_cases() + next_cases() + second_cases(),
    },
    _of_shape,
)
