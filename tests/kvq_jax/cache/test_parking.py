"""Parked caches: bodies in the host's memory and nowhere else, refused everywhere else, and back
bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from tests.kvq_jax.cache_runs import DIMS

SPEC = "kivi:recent=8,block=16"


def random_cache(placement: kvq.Placement | None = None) -> kvq.Cache:
    cache = kvq.init_cache(SPEC, DIMS, 2, 90, "float32", placement=placement)
    rng = np.random.default_rng(0)

    def random(array: jax.Array) -> jax.Array:
        return jax.device_put(rng.integers(0, 100, array.shape).astype(array.dtype), array.sharding)

    layers = jax.tree.map(random, cache.layers)
    return dataclasses.replace(cache, layers=layers, lengths=cache.lengths + 50)


def check_parking(cache: kvq.Cache) -> None:
    before, where = jax.tree.map(np.array, cache), jax.tree.map(lambda array: array.sharding, cache)
    parked = kvq.park(cache)
    assert all(
        leaf.is_deleted() for leaf in jax.tree.leaves([layer.body for layer in cache.layers])
    ), "bodies are on devices, too"
    for layer in parked.layers:
        kinds = [
            {leaf.sharding.memory_kind for leaf in jax.tree.leaves(part)}
            for part in (layer.body, (layer.ring, layer.stats))
        ]
        assert kinds == [{"pinned_host"}, {"device"}]
    assert kvq.nbytes(parked) == kvq.nbytes(before)
    for refuse in (
        kvq.park,
        lambda cache: kvq.trim(cache, [1, 1]),
        lambda cache: kvq.begin(cache, 1, prefill=False),
    ):
        with pytest.raises(ValueError, match=r"parked in the host's memory: kvq\.unpark"):
            refuse(parked)
    with pytest.raises(ValueError, match="parked in the host's memory"):
        jax.jit(lambda cache: kvq.begin(cache, 1, prefill=False).positions)(parked)
    after = kvq.unpark(parked)
    with pytest.raises(ValueError, match="was consumed"):
        kvq.unpark(parked)
    with pytest.raises(ValueError, match="is not parked"):
        kvq.unpark(after)
    for one, other, sharding in zip(
        jax.tree.leaves(before), jax.tree.leaves(after), jax.tree.leaves(where), strict=True
    ):
        assert one.tobytes() == np.asarray(other).tobytes()
        assert other.sharding == sharding
    assert jnp.any(after.layers[0].body[0].words[0] != 0), "zeros would pass"


def test_a_parked_cache_leaves_the_device_and_comes_back():
    check_parking(random_cache())


def test_a_device_without_pinned_memory_is_told_of_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvq_jax.cache.parking.HOST", "elsewhere")
    with pytest.raises(
        ValueError, match=r"no memory of kind 'elsewhere', only 'device', 'pinned_host'.*save_cache"
    ):
        kvq.park(random_cache())
