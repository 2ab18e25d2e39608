"""A cache with a windowed layer on a mesh: the same cache bit for bit, the same attention to
rounding. The windowed body is whole on every shard of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.layer.attention import Attention
from kvq_jax.placement.allowed import parse
from tests.multi_device.placed_runs import differing

SPEC = "kivi:bits=4,recent=8,block=16"
LAYERS = Attention(window=24, soft_cap=3.0, sinks=True), Attention(sinks=True)
DIMS = kvq.CacheDims(2, 4, 2, 32, 128, LAYERS)
START, STOP = 150, np.array([158, 151], np.int32)


@functools.partial(jax.jit, static_argnames="prompt")
def taken(cache: kvq.cache.Cache, rows: jax.Array, lengths: jax.Array, prompt: bool):
    """Return (attention of each layer, cache) after new tokens with these rows."""
    step, outs = kvq.begin(cache, rows.shape[2], lengths, prefill=prompt), []
    sinks = jnp.arange(4.0)
    for _ in cache.layers:
        out, step = kvq.append_and_attend(step, rows[:, :4], rows[:, 4:6], rows[:, 6:], sinks=sinks)
        outs.append(out)
    return jnp.stack(outs), kvq.finish(step)


@functools.cache
def run(mesh: str | None) -> tuple[kvq.cache.Cache, np.ndarray]:
    rows = jax.random.normal(jax.random.key(0), (2, 8, int(STOP.max()), 32))
    cache = kvq.init_cache(SPEC, DIMS, 2, 256, "float32", mesh and parse(mesh))
    assert [plan.regions.wraps for plan in cache.plans] == [True, False]
    _, cache = taken(cache, rows[:, :, :START], jnp.full(2, START), True)
    out, cache = taken(cache, rows[:, :, START:], jnp.asarray(STOP) - START, False)
    cache = kvq.rows.trim(cache, STOP - 20)
    more, cache = taken(cache, rows[:, :, START:], jnp.full(2, 8), False)
    outs = np.concatenate([np.asarray(out), np.asarray(more)], axis=3)
    real = np.arange(16) % 8 < np.where(np.arange(16) < 8, (STOP - START)[:, None], 8)
    return cache, np.where(real[:, None, :, None], outs, 0)


@pytest.mark.parametrize("mesh", ["rows=2,heads=2,tokens=2", "tokens=3"])
def test_windowed_layers_are_the_same_on_a_mesh(mesh: str):
    one, outputs = run(None)
    placed, found = run(mesh)
    wrong = differing(one.layers[0], kvq.rows.move(placed, None).layers[0])
    assert not wrong, wrong
    # on one device the native kernel reads the plain layer, with an exponential of its own
    assert np.abs(found - outputs).max() <= 1e-5 * np.abs(outputs).max()
    assert np.abs(np.roll(found, 1, axis=2) - outputs).max() > 1e-2
    shard = placed.layers[0].body[0].words[0].addressable_shards[0].data
    parts = placed.placement.size("rows") * placed.placement.size("heads")
    assert shard.size * parts == one.layers[0].body[0].words[0].size
    back = kvq.rows.move(one, parse(mesh))
    assert not differing(placed.layers[0], back.layers[0])


def test_a_trim_too_deep_is_refused_on_a_mesh():
    cache, _ = run("tokens=3")
    with pytest.raises(ValueError, match="window of 24"):
        kvq.rows.trim(cache, [40, 40])
