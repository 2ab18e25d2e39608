"""Tools of others that take a cache, as docs/own_model.md tells: gradients, export, checkpoints."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq

DIMS = kvq.CacheDims(1, 4, 2, 32, 128)


def new():
    return kvq.init_cache("kivi:bits=4,sink=0,recent=32,block=32", DIMS, 1, 128, "float32")


def step_of(tokens):
    """Return a step of one layer, and queries, keys and values."""

    def step(cache, q, k, v):
        step = kvq.begin(cache, tokens, prefill=tokens > 1, implementation="xla")
        out, step = kvq.append_and_attend(step, q, k, v)
        return out, kvq.finish(step)

    heads = enumerate((4, 2, 2))
    return step, [jax.random.normal(jax.random.key(i), (1, n, tokens, 32)) for i, n in heads]


def test_reverse_mode_is_refused_and_forward_mode_works():
    step, (q, k, v) = step_of(40)

    def total(q):
        return jnp.sum(step(new(), q, k, v)[0] ** 2)

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(total)(q)
    slope = float(jax.jvp(total, (q,), (v.repeat(2, axis=1),))[1])
    around = [float(total(q + h * v.repeat(2, axis=1))) for h in (1e-2, -1e-2)]
    assert slope == pytest.approx((around[0] - around[1]) / 2e-2, rel=1e-2)


def test_a_step_is_exported_as_a_function_of_the_caches_arrays():
    step, qkv = step_of(1)
    arrays, structure = jax.tree.flatten(new())

    def flat(arrays, *qkv):
        out, cache = step(structure.unflatten(arrays), *qkv)
        return out, jax.tree.leaves(cache)

    exported = jax.export.export(jax.jit(flat))(arrays, *qkv)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    out, after = exported.call(arrays, *qkv)
    np.testing.assert_array_equal(out, step(new(), *qkv)[0])
    assert int(structure.unflatten(after).lengths[0]) == 1


def test_orbax_keeps_the_arrays_that_hold_something(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    step, qkv = step_of(40)
    _, cache = step(new(), *qkv)
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="zero size"):
            checkpointer.save(tmp_path / "whole", cache)
        leaves, structure = jax.tree.flatten(cache)
        kept = {str(i): leaf for i, leaf in enumerate(leaves) if leaf.size}
        checkpointer.save(tmp_path / "kept", kept)
        checkpointer.wait_until_finished()
        kept = checkpointer.restore(tmp_path / "kept", kept)
    again = structure.unflatten([kept.get(str(i), leaf) for i, leaf in enumerate(leaves)])
    for one, other in zip(jax.tree.leaves(again), leaves, strict=True):
        np.testing.assert_array_equal(one, other)
