"""Every candidate lowers for CUDA, and a batch split for cuDNN attends as one sequence does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import attention_candidates, timed_case
from benchmarks.gpu.attention_candidates import (
    INEXACT_MERGE,
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
@pytest.mark.parametrize("spec", some([*SPECS, *MORE_SPECS], SPECS))
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


@pytest.mark.parametrize("group", [1, 4])
def test_a_split_batch_for_cudnn_attends_as_one_sequence_does(
    group: int, monkeypatch: pytest.MonkeyPatch
):
    """With XLA's attention in cuDNN's place. Either gives logarithms of sums in the dtype of the
    keys: in float32 they merge exactly, in bf16 a run's weight is off by up to 2^-9 of its
    logarithm, which the row's remark says."""
    attend = jax.nn.dot_product_attention

    def by_xla(*args, implementation: str, **options):
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return attend(*args, implementation="xla", **options)

    def by_xla_in_float32(q, k, v, **options):
        return by_xla(*(a.astype(jnp.float32) for a in (q, k, v)), **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla_in_float32)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 3, group, 64)) * 2, jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 512, 3, 64)), jnp.bfloat16) for _ in range(2))
    wanted = np.asarray(attention_candidates._cudnn(q, k, v))

    def errors(found: jax.Array) -> np.ndarray:
        return np.linalg.norm(np.asarray(found) - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)

    assert errors(attention_candidates._cudnn_split(4, q, k, v)).max() < 1e-5
    assert errors(attention_candidates._cudnn(q, k[:, :128], v[:, :128])).min() > 0.2, (
        "the first run alone would pass"
    )
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    assert 1e-3 < errors(attention_candidates._cudnn_split(4, q, k, v)).max() < 4e-2
    planned = {
        task.candidate: task for task in attention_tasks(shape_of("Llama-3.1-8B", 4096, 1), (), ())
    }
    remarks = {name: task.make().remark for name, task in planned.items()}
    assert {name for name, remark in remarks.items() if remark == INEXACT_MERGE} == {
        "cuDNN bf16, tokens split"
    }
