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


def test_what_shows_most_comes_first_and_compiles_in_seconds():
    first, following = PLANS.planned("first"), PLANS.planned("next")
    assert points(first) == [(32768, 16)]
    assert points(following[:3]) == [(131072, 1), (4096, 16), (32768, 1)]
    assert {case.section for case in following[3:]} == {"quantize"}
    slow = ("kvquant", "nf4", "polarquant", "pre_rope")
    for case in (*first, *following, *PLANS.planned("parity")):
        names = [task.candidate for task in case.tasks(INTERPRETED, ())]
        assert not [name for name in names if any(part in name for part in slow)], (
            "minutes of a compiler's time"
        )
        if case.section == "attention":
            assert names[:2] == ["XLA bf16", "cuDNN bf16"]
            assert {
                "dense",
                "kivi:bits=4",
                "kivi:bits=2",
                "innerq:bits=2",
                "innerq:bits=1,mode=sym",
            } <= set(names)


def test_tiny_cases_keep_their_sections():
    for plan in PLANS.stages:
        tiny = {case.tiny for case in PLANS.planned(plan)}
        assert {case.section for case in tiny} == {case.section for case in PLANS.planned(plan)}
        assert all(case.shape.tokens <= 2048 for case in tiny)
        assert len(tiny) < 30
