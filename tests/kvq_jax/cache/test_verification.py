"""Damage in live memory is found wherever something does not change any more, and nothing else is
taken for damage."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache import verification
from kvq_jax.cache.verification import _arrays, changes
from tests.kvq_jax.cache_runs import LENGTHS, filled
from tests.kvq_jax.layer_runs import CAPACITY, STEP, decode, parameters_of, sequences
from tests.methods_table import ONE_OF_EACH_LAYER, MethodCase, cases


def grown(cache: kvq.cache.Cache) -> kvq.cache.Cache:
    """Return the cache with some more tokens in its first layer."""
    plan, state, start = cache.plans[0], cache.layers[0], np.asarray(cache.lengths)
    stop = np.minimum(start + STEP, CAPACITY)
    tokens = sequences(cache.batch, seed=9)
    _, state, _ = decode(plan, parameters_of(plan), state, tokens.window(start, stop, STEP), ())
    return dataclasses.replace(
        cache, layers=(state, *cache.layers[1:]), lengths=jnp.asarray(stop, jnp.int32)
    )


def flipped(
    cache: kvq.cache.Cache, layer: int, path: str, index: tuple[int, ...]
) -> kvq.cache.Cache:
    """Return the cache with one flipped bit."""

    def flip(place, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(place) != path:
            return leaf
        array = np.array(leaf)
        array.view(f"uint{8 * array.dtype.itemsize}")[index] ^= 1 << (4 * array.dtype.itemsize)
        return jnp.asarray(array)

    layers = list(cache.layers)
    layers[layer] = jax.tree_util.tree_map_with_path(flip, layers[layer])
    return dataclasses.replace(cache, layers=tuple(layers))


@cases(usual=ONE_OF_EACH_LAYER)
def test_what_is_sealed_stays_and_every_flipped_bit_of_it_is_found(
    case: MethodCase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(verification, "PIECE", 16)
    cache = filled(case.spec, LENGTHS)
    seals = kvq.files.seal(cache)
    later = grown(cache)
    assert kvq.files.verify(cache, seals) == kvq.files.verify(later, seals) == (), (
        "a cache damages itself"
    )
    rng, damaged, expected = np.random.default_rng(0), later, set()
    for layer in range(2):
        regions = cache.plans[layer].regions
        for array in _arrays(cache, layer):
            batch, tokens = array.axes
            for row, kept in ((3, True), (6, True), (7, False)):
                stays = array.stays(regions, LENGTHS[row], int(later.lengths[row]))
                parts = np.flatnonzero(stays == kept)
                if parts.size and (kept or tokens is not None):
                    index = [int(rng.integers(n)) for n in array.spec.shape]
                    index[batch], part = row, int(rng.choice(parts))
                    if tokens is not None:
                        index[tokens] = part
                    damaged = flipped(damaged, layer, array.path, tuple(index))
                    expected |= (
                        {kvq.files.Damage(layer, row, array.path, (part,))} if kept else set()
                    )
    assert set(kvq.files.verify(damaged, seals)) == expected
    assert len(expected) >= 8, "hardly anything is covered"
    for row in (3, 6):
        alone = kvq.files.seal(damaged, row=row)
        of_row = {(d.layer, d.array, d.parts) for d in expected if d.row == row}
        assert of_row == {
            (damage.layer, damage.array, damage.parts)
            for layer, before in seals.items()
            for damage in changes(damaged, layer, before.of(row), alone[layer])
        }, "a sequence that is sealed alone"


@pytest.mark.parametrize(
    "spec", ["kivi:sink=0,recent=12,block=16", "turboquant:sink=2,recent=3,block=8"]
)
def test_sums_go_as_far_as_the_tokens_do(spec: str, monkeypatch: pytest.MonkeyPatch):
    row = 5
    assert LENGTHS[row] < CAPACITY // 2
    cache = filled(spec, LENGTHS)
    first = next(array for array in _arrays(cache, 0) if array.field == "body")
    index = [0] * len(first.spec.shape)
    index[first.axes[0]], index[first.axes[1]] = row, first.spec["tokens"].size - 1
    changed = flipped(cache, 0, first.path, tuple(index))
    whole = kvq.files.seal(cache, row=row)
    assert not alike(whole, kvq.files.seal(changed, row=row))
    monkeypatch.setattr(verification, "PIECE", 16)
    assert alike(whole, kvq.files.seal(cache, row=row)), "sums of pieces differ"
    assert alike(whole, kvq.files.seal(changed, row=row)), "what has no tokens is summed"


def alike(one: verification.Seals, other: verification.Seals) -> bool:
    pairs = [zip(one[layer].sums, other[layer].sums, strict=True) for layer in one]
    return all(np.array_equal(a, b) for sums in pairs for a, b in sums)


def test_a_length_that_shrinks_is_damage():
    cache = filled("kivi:sink=0,recent=12,block=16", LENGTHS)
    seals = kvq.files.seal(cache, [1])
    lengths = cache.lengths.at[5].add(-8)
    assert kvq.files.verify(dataclasses.replace(cache, lengths=lengths), seals) == (
        kvq.files.Damage(1, 5, "lengths", (0,)),
    )


def test_caches_on_a_mesh_are_refused():
    cache = filled("kivi:sink=0,recent=12,block=16", LENGTHS)
    placement = kvq.Placement(jax.sharding.AbstractMesh((1,), ("heads",)), heads="heads")
    with pytest.raises(NotImplementedError, match="on a mesh cannot be verified"):
        kvq.files.seal(dataclasses.replace(cache, placement=placement))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"layers": [0, 2]}, "layers must be between 0 and 1, got 2"),
        ({"layers": [-1]}, "layers must be between 0 and 1, got -1"),
        ({"row": 8}, "row must be between 0 and 7, got 8"),
    ],
)
def test_layers_and_rows_that_are_not_there_are_refused(what: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        kvq.files.seal(filled("kivi:sink=0,recent=12,block=16", LENGTHS), **what)
