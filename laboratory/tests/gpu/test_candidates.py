"""Every candidate lowers for CUDA, and a batch split for cuDNN attends as one sequence does."""

from __future__ import annotations

import jax
import pytest

from benchmarks.gpu import timed_case
from benchmarks.gpu.attention_candidates import (
    MORE_SPECS,
    SPECS,
    Planned,
    attention_tasks,
    shape_of,
)
from benchmarks.gpu.device_timing import timing_loop
from benchmarks.gpu.quantize_candidates import quantize_tasks
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.pallas_kernels.lowering import lower_for_cuda


@pytest.mark.parametrize("arithmetic", some(["asm", "jnp"], ["asm"]))
@pytest.mark.parametrize("spec", some([*SPECS, *MORE_SPECS], SPECS[:2]))
def test_attention_candidates_lower_for_cuda(spec: str, arithmetic: str):
    task = attention_tasks(shape_of("Llama-3.1-8B", 4096, 1), (Launch(arithmetic),), (spec,))[-1]
    assert "decode_attention" in lowered(task)


PLANNED = [
    *(
        task
        for task in attention_tasks(shape_of("Llama-2-7B", 4096, 1), (), ())
        if "cuDNN" not in task.candidate
    ),
    *quantize_tasks(shape_of("Llama-3.1-8B", 4096, 1), (Launch("asm"),)),
]


@pytest.mark.parametrize(
    "planned", PLANNED, ids=lambda planned: f"{planned.section}: {planned.candidate}"
)
def test_other_candidates_lower_for_cuda(planned: Planned):
    text = lowered(planned)
    assert ("triton" in text) == (planned.section == "quantize")


def lowered(planned: Planned) -> str:
    task = planned.make()
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, timed_case.SEED)
    [(_, call)] = task.calls
    return lower_for_cuda(timing_loop(call, task.feed, 2), x, [copy])
