"""Every method's prompts and steps lower for devices that this process does not have, and call no
library of the CPU there."""

import functools
import re

import jax
import numpy as np

from cpu_kernels.library import TARGETS
from kvq_jax.attention.dispatch import XLA
from kvq_jax.cache.layer_step import run_layer
from tests.kvq_jax.layer_runs import DIMS, automatic, empty, parameters_of, sequences
from tests.methods_table import ONE_OF_EACH, MethodCase, cases


def foreign(program: str) -> list[str]:
    """Return the custom calls of a lowered program that only a CPU has."""
    calls = re.findall(r"custom_call @([\w.$]+)", program)
    return [call for call in calls if call in TARGETS or call.startswith(("lapack", "blas"))]


@cases(*(case.id for case in ONE_OF_EACH), usual=("kivi2", "squat2", "kvquant4"))
def test_a_prompt_and_a_step_lower_for_other_devices(case: MethodCase):
    plan, state = empty(case.spec, batch=1)
    tokens, lengths = sequences(1), np.array([60], np.int32)
    prompt = tokens.window(np.zeros_like(lengths), lengths, 60)
    new = tokens.window(lengths, lengths + 1, 1)

    step = functools.partial(run_layer, implementation=None)

    def steps(params, state, below):
        out, state, _ = step(plan, DIMS, None, params, state, prompt, below, prefill=True)
        return out, step(plan, DIMS, None, params, state, new, below, prefill=False)[:2]

    traced = jax.jit(steps).trace(parameters_of(plan), state, tokens.below(plan))
    for platform in ("tpu", "cuda"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert not foreign(program), platform
    program = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert foreign(program) or automatic(plan) == XLA, "the CPU's own program has its kernels"
