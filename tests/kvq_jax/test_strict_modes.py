"""A user's settings of JAX change nothing: 64-bit types, strict promotion, checks for NaN and for
leaked tracers."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.paged import PagedBody
from kvq_jax.arrays.stored import BodySpec, store_blocks
from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import NATIVE, XLA, Route
from kvq_jax.cache.update import decode_layer, prefill_layer
from kvq_jax.types.array_types import Axis
from pallas_kernels.launch import Launch
from tests.compile_options import QUICK_COMPILE
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    beyond_rounding,
    empty,
    live,
    parameters_of,
    row_errors,
    sequences,
    with_small_chunks,
)
from tests.methods_table import ONE_OF_EACH, cases
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


def routes(plan):
    natively = dispatch.obstacle("native", plan, DIMS.num_attention_heads, 1) is None
    return (XLA, NATIVE) if natively else (XLA,)


def run_of(case):
    """Return a layer, two prompts of which one lets a block age with its next token, and one token
    after them."""
    plan, state = empty(case.spec, batch=2)
    regions, tokens = plan.regions, sequences(2)
    ages = regions.sink + regions.recent + 2 * regions.block - 1
    lengths = np.array([ages, ages - 3], np.int32)
    prompt = tokens.window(np.zeros_like(lengths), lengths, CAPACITY, padding=0.0)
    new = tokens.window(lengths, lengths + 1, 1)
    return plan, (parameters_of(plan), state, tokens.below(plan)), lengths, prompt, new


@cases()
def test_steps_hold_no_64_bit_floats_and_promote_nothing(case):
    plan, arrays, _, prompt, new = run_of(case)
    programs = [(prefill_layer, prompt)] + [
        (functools.partial(decode_layer, route=route), new) for route in routes(plan)
    ]
    for layer, inputs in programs:

        @with_small_chunks
        def step(params, state, below, inputs, layer=layer):
            return layer(plan, params, state, inputs, below)

        with strict_modes():
            jaxpr = jax.make_jaxpr(step)(*arrays, inputs)
        wide = re.findall(r"f64\[\d[^ ]*", str(jaxpr))  # not the scalars that Python floats are
        assert not wide, f"{layer} computes {wide[0]}"
        state = jaxpr.out_avals[1 : 1 + len(jax.tree.leaves(arrays[1]))]
        assert [a.dtype for a in state] == [a.dtype for a in jax.tree.leaves(arrays[1])], layer


@cases(*(case.id for case in ONE_OF_EACH), usual=("kivi2", "zipcache42"))
def test_strict_modes_change_no_step(case):
    """The modes run a prompt and one more token, by every implementation."""
    plan, (params, state, below), lengths, prompt, new = run_of(case)

    def steps(params, state, below):
        out, state, _ = prefill_layer(plan, params, state, prompt, below)
        decoded = [
            decode_layer(plan, params, state, new, below, route)[:2] for route in routes(plan)
        ]
        return [(out, state), *decoded]

    compiled = jax.jit(with_small_chunks(steps), compiler_options=QUICK_COMPILE)
    wanted = compiled(params, state, below)
    with strict_modes():
        taken = compiled(params, state, below)
    for name, mine, plain in zip(("prompt", *routes(plan)), taken, wanted, strict=True):
        after = lengths if name == "prompt" else lengths + 1
        assert not beyond_rounding(live(plan, mine[1], after), live(plan, plain[1], after)), name
        used = np.asarray((prompt if name == "prompt" else new).valid)[:, None]
        errors = row_errors(mine[0], plain[0])[np.broadcast_to(used, mine[0].shape[:3])]
        assert errors.max() < 1e-5, f"{name}: {errors.max()}"
    assert row_errors(mine[0][::-1], plain[0]).max() > 0.1, "another row's output would pass"


def kernels_of(text):
    """Return the bodies of the kernels in a lowered program."""
    return re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', text) or re.findall(
        r"mhlo.backend_config = (\{[^\n]*\})", text
    )


def test_the_modes_of_this_test_are_on():
    with strict_modes():
        with pytest.raises(ValueError, match="dtype promotion"):
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


@pytest.mark.usefixtures("types_unchecked")
def test_blocks_are_stored_without_jit():
    """Under jax.disable_jit, the indices of loops are integers of Python."""
    block = BodySpec((Axis("batch", 1), Axis("tokens", 4)), "int8")
    empty_body, new = jnp.zeros((2, 16), jnp.int8), jnp.arange(1, 17, dtype=jnp.int8).reshape(2, 8)
    first, count = jnp.array([1, 2], jnp.int32), jnp.array([2, 1], jnp.int32)
    pages, table = jnp.zeros((8, 4), jnp.int8), jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    paged = PagedBody(pages, table)
    with jax.disable_jit():
        stored = store_blocks(block, empty_body, new, first, count)
        in_pages = store_blocks(block, paged, new, first, count)
    wanted = [[0] * 4 + list(range(1, 9)) + [0] * 4, [0] * 8 + list(range(9, 13)) + [0] * 4]
    np.testing.assert_array_equal(stored, wanted)
    np.testing.assert_array_equal(in_pages.pages.reshape(2, 16), wanted)
