"""A key bias in a RoPE pair that turns within a group of tokens: its harm, and `kvq doctor`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models.llama.rope import rope_for
from kvq_tools.cli.doctor_warnings import known_problems
from tests.kvq_models.checkpoints import tiny_config

CONFIG = tiny_config(
    "qwen2", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=128
)
CAPACITY, BIAS, PAIRS = 256, 300.0, 64
KIVI, POLAR, ZIP = "k=kivi:bits=4+v=dense", "k=polarquant+v=dense", "zipcache:probes=8"


def biased(pair):
    return np.zeros(128, np.float32) if pair is None else BIAS * np.eye(128, dtype=np.float32)[pair]


def logits_error(spec, pair):
    """Return the standard deviation of the error of the logits of random keys with this bias."""
    rope = rope_for(CONFIG, CAPACITY)
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, CAPACITY, 128)) for i in range(2))
    positions = jnp.arange(CAPACITY, dtype=jnp.int32)[None]
    q, keys = (
        kvq.types.rotate(x, positions, rope) for x in (q, k + biased(pair)[None, None, None])
    )
    stored, _ = kvq.roundtrip(spec, keys, keys, q=q)
    return float(jnp.std(jnp.einsum("bnth,bksh->ts", q, stored - keys))) / np.sqrt(128)


def turning(spec, pair, capacity=CAPACITY):
    cache = kvq.cache.layout(spec, CONFIG, 1, capacity, "float32")
    return [w for w in known_problems(CONFIG, cache, [biased(pair)]) if "RoPE turns" in w]


@pytest.mark.parametrize("spec", [KIVI, POLAR, ZIP])
def test_the_doctor_warns_of_the_pairs_that_hurt_and_of_no_others(spec):
    """Pair 0 turns by a radian a token, the last one hardly."""
    plain = logits_error(spec, None)
    for pair, hurts in ((0, True), (PAIRS // 4, True), (PAIRS - 1, False)):
        error = logits_error(spec, pair)
        assert bool(error > 2 * plain) is hurts, (
            f"pair {pair}: {error:.3f}, without bias {plain:.3f}"
        )
        found = turning(spec, pair)
        assert bool(found) is hurts, f"pair {pair}: {found}"
        if hurts:
            assert f"bias of pair {pair} (KV head 0) by" in found[0]
            assert ("subtract_bias=true" in found[0]) is (spec != ZIP), "it declines the option"


@pytest.mark.parametrize(
    "spec",
    [
        "k=kivi:bits=4,pre_rope=true+v=dense",
        "k=kivi:bits=4+v=dense+cache:subtract_bias=true",
        "dense",
    ],
)
def test_keys_that_do_not_turn_are_spared(spec):
    assert not turning(spec, 0)


def test_the_step_that_the_doctor_names_is_the_step_of_the_group():
    """The whole turn of 600 over the 15 steps of 4 bits."""
    assert "by 600 within groups of 32 tokens, steps of about 40;" in turning(KIVI, 0)[0]
    assert "skip_layers=0" in turning(KIVI, 0)[0]
