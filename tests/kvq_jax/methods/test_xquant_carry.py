"""XQuant-CL's accumulator, carried from layer to layer through prompts and steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.stored import load_body
from kvq_jax.cache.cache import CacheDims
from kvq_jax.cache.update import decode_layer
from kvq_jax.layer import cross_layer
from tests.kvq_jax.layer_runs import (
    STEP,
    beyond_rounding,
    decode,
    live,
    parameters_of,
    prefill,
    sequences,
)

CARRIED = "xquant_cl:base_layer=1,group_size=16,latent={},sink=2,recent=3,block=16"


def flow(spec: str, prompt: int, stop: int, capacity: int = 90):
    """Prefill and decode three layers of one cache, each with its own tokens, and return the state
    of every layer."""
    dims = CacheDims(3, 4, 2, 32, 128)
    cache = kvq.init_cache(spec, dims, 2, capacity, "float32")
    tokens = [sequences(2, dims, seed=30 + i) for i in range(3)]
    states, own = list(cache.layers), [parameters_of(plan) for plan in cache.plans]
    at = np.zeros(2, np.int32)
    while at[0] < stop:
        first = at[0] == 0 and prompt > 0
        until = np.full(2, prompt if first else stop, np.int32)
        carry: Any = ()
        for i, plan in enumerate(cache.plans):
            step, size = (prefill, capacity) if first else (decode, STEP)
            _, states[i], carry = step(
                plan, own[i], states[i], tokens[i].window(at, until, size), carry
            )
        at = np.minimum(at + (prompt if first else STEP), stop).astype(np.int32)
    return cache.plans, states, own


@pytest.mark.parametrize("latent", ["true", "false"])
def test_codes_do_not_depend_on_where_the_prompt_ended(latent: str):
    """Through three layers, the accumulator flowing from one to the next."""
    spec, length = CARRIED.format(latent), np.full(2, 80, np.int32)
    plans, whole, _ = flow(spec, 80, 80)
    _, split, _ = flow(spec, 29, 80)
    for i, plan in enumerate(plans):
        first, second = live(plan, whole[i], length), live(plan, split[i], length)
        codes = [name for name in first if "words" in name]
        off = {name: float((first[name] != second[name]).mean()) for name in codes}
        assert max(off.values()) <= 1e-3, f"layer {i}: share of words that differ {off}"
        exact = {name: a for name, a in first.items() if name.startswith(("ring", "sink"))}
        assert not beyond_rounding(exact, {name: second[name] for name in exact}), f"layer {i}"
    later, earlier = (live(plans[2], whole[i], length) for i in (2, 1))
    assert beyond_rounding(
        {"ring": later["ring.kv"][..., :64]}, {"ring": earlier["ring.kv"][..., :64]}
    ), "layers hold the same rows"


def test_the_accumulator_is_what_the_layers_below_said():
    """acc after a layer = acc before it + its decoded beyond_rounding, for live tokens of a ragged
    batch."""
    plans, states, own = flow(CARRIED.format("true"), 80, 80)
    live_tokens = jnp.asarray([64, 32], jnp.int32)
    base = cross_layer.advance(plans[1], own[1], states[1], live_tokens, ())
    after = cross_layer.advance(plans[2], own[2], states[2], live_tokens, base)
    codec = plans[2].k
    decoded = codec.dequantize(own[2][0], (), load_body(codec.body(1, 1, 16), states[2].body[0]))
    wanted = base + jnp.einsum("btc,dc->btd", decoded[:, 0], own[2][0]["basis"])
    np.testing.assert_allclose(after[:, :64], wanted[:, :64], atol=1e-5)
    assert np.abs(np.asarray(after - base))[:, :64].max() > 1e-2, "the layer added nothing"


def test_a_layer_without_its_accumulator_is_an_error():
    plans, states, own = flow(CARRIED.format("true"), 20, 20)
    inputs = sequences(2).window(np.full(2, 20, np.int32), np.full(2, 28, np.int32), STEP)
    with pytest.raises(ValueError, match="builds on the one below it"):
        decode_layer(plans[2], own[2], states[2], inputs, ())
