"""The plans of a run on a GPU: the whole table of shapes, and what shows most first."""

from __future__ import annotations

from benchmarks.gpu.attention_candidates import MODELS, MORE_SPECS, SPECS
from benchmarks.gpu.plans import PLANS, Case
from pallas_kernels.launch import Launch

INTERPRETED = (Launch(interpret=True),)


def points(cases: list[Case]) -> list[tuple[int, int]]:
    return [(case.shape.tokens, case.shape.batch) for case in cases]


def test_the_plans_cover_the_shape_table():
    cases = PLANS.planned("all")
    for model in MODELS:
        chosen = [
            case
            for case in cases
            if (case.section, case.model, case.specs) == ("attention", model, SPECS)
        ]
        assert sorted(points(chosen)) == [
            (512 << i, batch) for i in range(9) for batch in (1, 16)
        ], model
    assert len({case.name for case in cases}) == len(cases)
    [more] = [case for case in cases if case.specs == MORE_SPECS]
    wanted = [task.candidate for task in more.tasks(INTERPRETED, ())]
    assert wanted[-len(MORE_SPECS) :] == list(MORE_SPECS)
    asked = [task.candidate for task in more.tasks(INTERPRETED, ("nf4",))]
    assert asked[-1] == "nf4", "a list on the command line goes for every case"
    assert not set(asked) & (set(MORE_SPECS) - {"nf4"})
