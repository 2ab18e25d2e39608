"""A user's settings of JAX change nothing: 64-bit types, strict promotion, checks for NaN and for
leaked tracers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import NATIVE, XLA, Route
from kvq_jax.cache.update import decode_layer, prefill_layer
from pallas_kernels.launch import Launch
from tests.compile_options import QUICK_COMPILE
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    STEP,
    beyond_rounding,
    empty,
    live,
    parameters_of,
    row_errors,
    sequences,
    with_small_chunks,
)
from tests.methods_table import cases
from tests.pallas_kernels.lowering import lower_for_cuda


@contextlib.contextmanager
def strict_modes():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
        jax.checking_leaks(),
    ):
        yield


@functools.cache
def steps_of(plan):
    """Return a compiled function that takes a prompt, and one token more by every implementation:
    the outputs, and the states after them."""

    def steps(params, state, prompt, new, below):
        out, state, _ = prefill_layer(plan, params, state, prompt, below)
        taken = [(out, state)]
        for route in routes(plan, 1):
            taken.append(decode_layer(plan, params, state, new, below, route)[:2])
        return taken

    return jax.jit(with_small_chunks(steps), compiler_options=QUICK_COMPILE)


def routes(plan, tokens):
    natively = dispatch.obstacle("native", plan, DIMS.num_attention_heads, tokens) is None
    return (XLA, NATIVE) if natively else (XLA,)


@cases()
def test_strict_modes_change_no_step(case):
    plan, state = empty(case.spec, batch=2)
    params, tokens = parameters_of(plan), sequences(2)
    regions, below = plan.regions, tokens.below(plan)
    ages = regions.sink + regions.recent + 2 * regions.block - 1  # one token more, and a block ages
    lengths = np.array([ages, ages - 3], np.int32)
    prompt = tokens.window(np.zeros_like(lengths), lengths, CAPACITY, padding=0.0)
    new = tokens.window(lengths, lengths + 1, 1)
    arrays = params, state, prompt, new, below
    wanted = steps_of(plan)(*arrays)
    with strict_modes():
        taken = steps_of(plan)(*arrays)
        several = tokens.window(lengths, lengths + STEP, STEP)
        for route in routes(plan, STEP):
            step = functools.partial(decode_layer, plan, route=route)
            jaxpr = jax.make_jaxpr(step)(params, state, several, below)
            assert "f64[" not in str(jaxpr), f"{route} computes 64-bit floats"
    for name, mine, plain in zip(("prompt", *routes(plan, 1)), taken, wanted, strict=True):
        assert jax.tree.map(jnp.dtype, mine) == jax.tree.map(jnp.dtype, plain), name
        after = lengths if name == "prompt" else lengths + 1
        assert not beyond_rounding(live(plan, mine[1], after), live(plan, plain[1], after)), name
        used = np.asarray((prompt if name == "prompt" else new).valid)[:, None]
        errors = row_errors(mine[0], plain[0])[np.broadcast_to(used, mine[0].shape[:3])]
        assert errors.max() < 1e-5, f"{name}: {errors.max()}"


def kernels_of(text):
    """Return the bodies of the kernels in a lowered program."""
    return re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', text) or re.findall(
        r"mhlo.backend_config = (\{[^\n]*\})", text
    )


def test_the_modes_of_this_test_are_on():
    with strict_modes():
        with pytest.raises(jax.errors.TypePromotionError):
            jnp.arange(3) + jnp.arange(3, dtype=jnp.int32)
        with pytest.raises(FloatingPointError):
            jnp.log(jnp.float32(-1))
        assert "f64[" in str(jax.make_jaxpr(jnp.sin)(np.float64(1)))


@pytest.mark.parametrize("tokens", [1, 160], ids=["step", "prompt"])
def test_gpu_kernels_are_the_same_under_x64(tokens):
    dims = dataclasses.replace(DIMS, head_dim=64)
    plan, state = empty("kivi:bits=2,group_size=32,recent=32,block=32", 1, dims, 160, "bfloat16")
    rows = sequences(1, dims, 160, dtype="bfloat16")
    inputs = rows.window(np.zeros(1, np.int32), np.full(1, tokens, np.int32), tokens)
    layer = prefill_layer if tokens > 1 else decode_layer

    def step(state, inputs):
        return layer(plan, (), state, inputs, (), Route("pallas", Launch()))

    plain = lower_for_cuda(step, state, inputs)
    with strict_modes():
        wide = lower_for_cuda(step, state, inputs)
    assert kernels_of(wide) == kernels_of(plain), "a kernel has other code under x64"
    assert len(kernels_of(plain)) >= 2
