"""The cache of one layer in the tools of others, as docs/own_model.md tells: gradients, remat,
export, orbax, treescope. (tests/multi_device/test_layer_plans.py has a host's shard_map.)"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq

PLAN = kvq.layer_plan(
    "kivi:bits=4,sink=0,recent=32,block=32",
    kvq.CacheDims(1, 4, 2, 32, 128),
    layer=0,
    capacity=128,
    dtype="float32",
)


@pytest.fixture(scope="module")
def qkv() -> tuple[jax.Array, ...]:
    return tuple(
        jax.random.normal(jax.random.key(i), (1, 80, n, 32)) for i, n in enumerate((4, 2, 2))
    )


@pytest.fixture(scope="module")
def cache(qkv: Any) -> kvq.cache.LayerCache:
    """Return a cache whose body holds tokens."""
    return PLAN.append(PLAN.init(1), *(a[:, :79] for a in qkv[1:]))


def step(cache: kvq.cache.LayerCache, q: Any, k: Any, v: Any) -> Any:
    return PLAN.attend(cache, q, k, v, prefill=False, implementation="xla")


@pytest.fixture(scope="module")
def expected(cache: kvq.cache.LayerCache, qkv: Any) -> Any:
    return jax.jit(step)(cache, *(a[:, 79:] for a in qkv))


def check(found: Any, expected: Any, cache: Any) -> None:
    (out, after), (wanted, wanted_after) = found, expected
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    assert after.lengths.tolist() == wanted_after.lengths.tolist() == [80]
    rings = [np.asarray(c.state.ring[0]) for c in (after, wanted_after, cache)]
    np.testing.assert_array_equal(rings[0], rings[1])
    assert not np.array_equal(rings[0], rings[2]), "a step that writes nothing would pass"


def test_reverse_mode_is_refused_and_forward_mode_works(cache: Any, qkv: Any):
    q, k, v = (a[:, 79:] for a in qkv)

    def total(q: jax.Array) -> jax.Array:
        return jnp.sum(step(cache, q, k, v)[0] ** 2)

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(total)(q)
    direction = v.repeat(2, axis=2)
    slope = float(jax.jvp(total, (q,), (direction,))[1])
    around = [float(total(q + h * direction)) for h in (1e-2, -1e-2)]
    assert slope == pytest.approx((around[0] - around[1]) / 2e-2, rel=1e-2)


def test_remat_changes_nothing(cache: Any, qkv: Any, expected: Any):
    check(jax.jit(jax.checkpoint(step))(cache, *(a[:, 79:] for a in qkv)), expected, cache)


def test_a_step_is_exported_as_a_function_of_leaves(cache: Any, qkv: Any):
    """Of leaves, for `jax.export` knows no other trees."""
    leaves, structure = jax.tree.flatten(cache)

    @jax.jit
    def flat(leaves: Any, *qkv: Any) -> Any:
        out, after = step(structure.unflatten(leaves), *qkv)
        return out, jax.tree.leaves(after)

    token = [a[:, 79:] for a in qkv]
    exported = jax.export.export(flat)(leaves, *token)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    out, after = exported.call(leaves, *token)
    np.testing.assert_array_equal(out, flat(leaves, *token)[0])
    assert structure.unflatten(after).lengths.tolist() == [80]


def test_orbax_keeps_the_leaves_that_hold_something(cache: Any, tmp_path: Any):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
    leaves, structure = jax.tree.flatten(cache)
    kept = {str(i): leaf for i, leaf in enumerate(leaves) if leaf.size}
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="zero size"):
            checkpointer.save(tmp_path / "whole", cache)
        checkpointer.save(tmp_path / "kept", kept)
        checkpointer.wait_until_finished()
        kept = checkpointer.restore(tmp_path / "kept", kept)
    again = structure.unflatten([kept.get(str(i), leaf) for i, leaf in enumerate(leaves)])
    for one, other in zip(jax.tree.leaves(again), leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_treescope_shows_a_cache_and_a_plan(cache: Any):
    treescope = pytest.importorskip("treescope", reason="treescope is not installed")
    for value in (cache, PLAN):
        shown = treescope.render_to_text(value)
        assert type(value).__name__ in shown
