"""Whole caches for the tests of cache algebra and of files: two layers, the second kept exact or
coded as the spec says."""

import dataclasses
import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.cache import row_operations
from kvq_jax.cache.cache import CacheDims
from kvq_jax.layer import cross_layer
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    STEP,
    attend_reference,
    decode,
    decode_rows,
    parameters_of,
    prefill,
    quick_jit,
    sequences,
)

DIMS = CacheDims(2, 4, 2, 32, 128)
LENGTHS = (0, 1, 15, 16, 17, 40, 89, 90)
trim_layer = quick_jit(row_operations._trim_layer, static_argnums=0)


def trim(cache: kvq.cache.Cache, lengths: np.ndarray) -> kvq.cache.Cache:
    """Return the trimmed cache. Layers of equal plans, in all files, share a compiled program."""
    parameters = tuple(parameters_of(plan) for plan in cache.plans)
    with mock.patch.object(row_operations, "_trim_layer", trim_layer):
        return kvq.rows.trim(cache, lengths, parameters)


@functools.cache
def filled(
    spec: str, lengths: tuple[int, ...] = (CAPACITY,) * 8, dtype: str = "float32"
) -> kvq.cache.Cache:
    """Return a cache whose layers hold prompts of these lengths. Shared: do not donate it."""
    cache = kvq.init_cache(spec, DIMS, len(lengths), CAPACITY, dtype)
    stop = np.array(lengths, np.int32)
    states, carry = [], ()
    for seed, (plan, state) in enumerate(zip(cache.plans, cache.layers, strict=True)):
        inputs = sequences(len(lengths), seed=seed, dtype=dtype).window(
            np.zeros_like(stop), stop, CAPACITY
        )
        _, state, carry = prefill(plan, parameters_of(plan), state, inputs, carry)
        states.append(state)
    return dataclasses.replace(cache, layers=tuple(states), lengths=jnp.asarray(stop))


def rows_of(cache: kvq.cache.Cache) -> list[list[np.ndarray]]:
    """Decoded rows of every layer, zeros from the live length on."""
    found, carry = [], ()
    for plan, state in zip(cache.plans, cache.layers, strict=True):
        params = parameters_of(plan)
        found.append(
            [np.asarray(rows) for rows in decode_rows(plan, params, state, cache.lengths, carry)]
        )
        carry = cross_layer.advance(
            plan, params, state, plan.regions.aged_tokens(cache.lengths), carry
        )
    return found


def continued(cache: kvq.cache.Cache, stop: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """New tokens decoded onto the first layer up to `stop`: (each row's last output, that of the
    reference; NaN where there is none)."""
    plan, state, start = cache.plans[0], cache.layers[0], np.asarray(cache.lengths)
    tokens = sequences(cache.batch, seed=seed)
    out, state, _ = decode(plan, parameters_of(plan), state, tokens.window(start, stop, STEP), ())
    last = np.maximum(stop - 1, 0).astype(np.int32)
    found = np.take_along_axis(
        np.asarray(out), np.maximum(stop - start - 1, 0)[:, None, None, None], axis=2
    )
    seen = np.arange(cache.capacity)[None, None] < stop[:, None, None]
    inputs = tokens.window(last, stop, 1)
    want = attend_reference(
        plan, parameters_of(plan), state, jnp.asarray(stop, jnp.int32), inputs, jnp.asarray(seen)
    )
    return found, np.where((stop > start)[:, None, None, None], want, np.nan)
