"""The loop that times a candidate, compiled for an H200 without having one, contains all the work
of a call.
"""

import re
from typing import Any

import jax
import pytest

from benchmarks.gpu import device_timing, timed_case
from benchmarks.gpu.attention_candidates import DEQUANTIZED, attention_tasks, shape_of
from benchmarks.machine_code.compile import compile_for
from benchmarks.machine_code.target import H200


def done_before_the_loop() -> list[str]:
    """Return the operations on stored arrays before the loop in the timed program of the candidate
    that dequantizes.
    """
    task = next(
        t
        for t in attention_tasks(shape_of("Llama-3.1-8B", 4096, 16), ())
        if t.candidate.startswith(DEQUANTIZED)
    ).make()
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, timed_case.SEED)
    loop = device_timing.timing_loop(task.calls[0][1], task.feed, 3)
    text = compile_for(H200, loop, (x, [copy] * 2)).compiled.as_text()
    before, keyword, _ = text[text.index("\nENTRY") :].partition(" while(")
    assert keyword, "there is no loop"
    return re.findall(r"(?:fusion|transpose|copy)\([^)]*copies_[^)]*\)", before)


def test_nothing_of_a_call_is_done_once_before_the_loop(monkeypatch: pytest.MonkeyPatch):
    assert done_before_the_loop() == []

    def unchanged(copy: Any) -> Any:
        return copy

    monkeypatch.setattr(device_timing, "as_stored", unchanged)
    assert done_before_the_loop(), (
        "where the order of axes is not fixed, scales are transposed once for all calls"
    )
