"""Every cache that kernels serve can be timed: its random body, its keys after RoPE, its error.
What kernels do not serve says why."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cpu.timing import Shape
from benchmarks.gpu import random_bodies, timed_case
from benchmarks.gpu.attention_candidates import MORE_SPECS, SPECS, attention_tasks
from benchmarks.gpu.device_timing import Timing
from benchmarks.gpu.random_bodies import bodies_of, plan_of
from benchmarks.gpu.report import GpuReport, KernelRow
from kvq_jax.attention.dispatch import unsupported
from kvq_jax.methods.registry import METHODS
from pallas_kernels.launch import Launch
from tests.exhaustive import some

SHAPE = Shape(1, 128, 64, 2, 2)
INTERPRETED = (Launch(interpret=True),)
SERVED = (
    *("dense", "squat_pre", "int4", *MORE_SPECS),
    *(
        "kvquant:bits=3,outliers=0,pre_rope=false,k_axis=token,v_axis=channel",
        "k=kvquant:bits=3,outliers=0.02+v=kivi:bits=4",
    ),
    "k=polarquant:radius_bits=2+v=innerq:bits=2",
)


@pytest.fixture
def row(spec: str) -> KernelRow:
    """Return the row of one cache in the benchmark."""
    report = GpuReport.here("Kernels of a test", ("benchmarks.gpu.kernels",))
    timing = Timing(samples=1, seconds=0, max_copies=1, copy_bytes=1 << 20)
    [task] = (
        task for task in attention_tasks(SHAPE, INTERPRETED, (spec,)) if task.candidate == spec
    )
    timed_case.run_entries(
        timed_case.entries_of("Llama-3.2-1B", SHAPE, [task]),
        report,
        lambda: None,
        timing,
        threads=1,
    )
    [row] = report.rows
    return row


@pytest.mark.parametrize(
    "spec", some(SERVED, ("dense", "k=kvquant:bits=3,outliers=0.02+v=kivi:bits=4"))
)
def test_a_cache_with_kernels_gets_a_time_and_an_error(row: KernelRow, spec: str):
    assert row.failure == "", row
    assert len(row.samples_ms) == 1
    assert row.idle_ms is not None
    assert row.error is not None
    assert row.error < 5e-3, row
    assert row.bf16 == (spec == "dense")


@pytest.mark.parametrize("spec", some([*SPECS, *METHODS], SPECS))
def test_each_methods_kernels_are_traced_or_refused_with_the_reason(spec: str):
    shape = Shape(2, 1024, 128, 8, 4)
    if reason := unsupported(plan_of(spec, shape), 32, 1):
        with pytest.raises(ValueError, match=re.escape(reason)):
            bodies_of(spec, shape)
        return
    task = attention_tasks(shape, (Launch("jnp"),), (spec,))[-1].make()
    x, copy = jax.eval_shape(task.start), jax.eval_shape(task.copy, timed_case.SEED)
    out = jax.eval_shape(task.calls[0][1], x, copy)
    assert out.shape == x[0].shape
    assert task.check is not None
    found, wanted = jax.eval_shape(task.check, x, copy, out)
    assert found.shape == wanted.shape == (1, random_bodies.CHECKED_HEADS, 4, 128)


@pytest.mark.parametrize(("spec", "tokens"), [("nf4", 128), ("waterfill:bits=2.5", 256)])
def test_the_reference_rejects_other_contents(spec: str, tokens: int):
    """Negative control of the errors above: another seed, keys and values exchanged for the next
    head's."""
    task = attention_tasks(dataclasses.replace(SHAPE, tokens=tokens), INTERPRETED, (spec,))[
        -1
    ].make()
    x, copy, other = task.start(), task.copy(jnp.uint32(1)), task.copy(jnp.uint32(2))
    out = task.calls[0][1](x, copy)
    assert task.check is not None
    assert timed_case.relative_error(*task.check(x, copy, out)) < 5e-3
    assert timed_case.relative_error(*task.check(x, other, out)) > 0.1
    assert timed_case.relative_error(*task.check(x, copy, jnp.roll(out, 1, axis=1))) > 0.1
