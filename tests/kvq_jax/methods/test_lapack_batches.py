"""No program of any method gives LAPACK a batch: threads of JAX 0.10 may wait for each other's
parts for ever (docs/decisions/methods.md)."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.kvq_jax.layer_runs import (
    STEP,
    boundary_lengths,
    decode,
    empty,
    parameters_of,
    prefill,
    sequences,
)
from tests.methods_table import ONE_OF_EACH, MethodCase

FACTORS = re.compile(r"cholesky|eigh|qr|svd|triangular_solve|\blu\b")  # operations in a trace
CALL = re.compile(r"custom_call @((?:lapack|blas)_\w+)\(.*: \((.*?)\) ->")


def batches(function: Any, *arguments: Any) -> dict[str, set[int]]:
    """Return, for each LAPACK routine that a jitted function calls on CPUs, how many matrices its
    calls have."""
    found: dict[str, set[int]] = {}
    traced = function.trace(*arguments)  # by the other tests of this row, so in no time
    if not FACTORS.search(str(traced.jaxpr)):
        return found
    for name, operands in CALL.findall(traced.lower().as_text()):
        sizes = [
            math.prod(int(n) for n in shape.split("x")[:-3])
            for shape in re.findall(r"tensor<((?:\d+x)+\w+)>", operands)
        ]
        found.setdefault(name, set()).update(sizes)
    return found


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)
def test_lapack_gets_one_matrix_at_a_time(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, zero, lengths = sequences(), np.zeros(8, np.int32), boundary_lengths(plan)
    prompt, new = (
        tokens.window(zero, lengths, plan.regions.capacity),
        tokens.window(zero, lengths, STEP),
    )
    found = batches(prefill, plan, parameters_of(plan), state, prompt, tokens.below(plan))
    assert all(sizes == {1} for sizes in found.values()), f"prefill: {found}"
    assert bool(found) == case.spec.startswith("squat"), (
        f"a method that factors matrices is not told apart from one that does not: {found}"
    )
    decoded = batches(decode, plan, parameters_of(plan), state, new, tokens.below(plan))
    assert all(sizes == {1} for sizes in decoded.values()), f"decode: {decoded}"


def test_batches_are_seen():
    """Negative control."""
    matrices = jnp.ones((3, 2, 4, 4))
    for function in (
        jnp.linalg.cholesky,
        jnp.linalg.eigh,
        jnp.linalg.qr,
        lambda a: lax.linalg.triangular_solve(a, a, lower=True),
    ):
        found = batches(jax.jit(function), matrices)
        assert found
        assert all(6 in sizes for sizes in found.values()), found
        assert all(sizes == {1} for sizes in batches(jax.jit(function), matrices[0, 0]).values())
