"""ZipCache against what its public code's functions return for the same numbers (tests/golden/),
and its saliency against a definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.methods.zipcache.codec import ZipCodec
from kvq_jax.methods.zipcache.saliency import probe_positions, probes_of, saliency
from tests.kvq_jax.methods.test_golden import compare_numbers, golden

TOKENS = 24


def inputs(seed: int = 0, valid: int = TOKENS) -> kvq.types.LayerInputs:
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, heads, TOKENS, 32)), jnp.float32) for heads in (4, 2, 2)
    )
    real = jnp.arange(TOKENS)[None] < valid
    return kvq.types.LayerInputs(
        None, None, 2 * q, None, k, v, jnp.arange(TOKENS)[None], real, None
    )


SINKS = np.array([-1.0, 0.5, 2.0, 4.0])
SPECIAL = kvq.Attention(window=9, scale=0.3, soft_cap=4.0, sinks=True)


def wanted_saliency(
    given: kvq.types.LayerInputs, probes: np.ndarray, valid: int, attention: kvq.Attention
) -> np.ndarray:
    """The definition, probe after probe: [K, T], for tokens that some probe sees."""
    window, scale = attention.window or TOKENS, attention.factor(32)
    cap = attention.soft_cap or 1e9
    q, k = np.asarray(given.q_rot[0], np.float16).astype(float), np.asarray(given.k_rot[0], float)
    total, count = np.zeros((2, valid)), np.zeros(valid)
    for p in probes:
        seen = (np.arange(valid) <= p) & (np.arange(valid) > p - window)
        count += seen
        for head in range(4):
            products = k[head // 2, :valid] @ q[head, p] * scale
            weights = np.where(seen, np.exp(cap * np.tanh(products / cap)), 0)
            sink = np.exp(SINKS[head]) if attention.sinks else 0
            total[head // 2] += weights / (weights.sum() + sink) / 2
    return total / np.maximum(count, 1)


@pytest.mark.parametrize("attention", [kvq.Attention(), SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("valid", [TOKENS, 17])
def test_saliency_is_the_mean_attention_of_the_probes_that_see_a_token(
    valid: int, attention: kvq.Attention
):
    given = dataclasses.replace(inputs(valid=valid), sinks=jnp.asarray(SINKS, jnp.float32))
    found = probes_of(given, 8, attention)
    positions = np.asarray(found["positions"])[0]
    wanted = wanted_saliency(given, positions, valid, attention)
    met = (wanted > 0).all(axis=0)
    assert met[-(attention.window or TOKENS) :].all(), "the last probe sees all that is held"
    actual = np.asarray(saliency(found, given.k_rot, given.positions, attention))[0][:, :valid]
    np.testing.assert_allclose(actual[:, met], wanted[:, met], rtol=2e-4)
    by_all = (positions[:, None] >= np.arange(valid)).sum(0)[met] / len(positions)
    assert np.abs(by_all - 1).max() > 0.3, "dividing by the number of all probes would pass"
    other = SPECIAL if attention == kvq.Attention() else kvq.Attention()
    plain = np.asarray(saliency(found, given.k_rot, given.positions, other))[0][:, :valid]
    assert np.abs(plain[:, met] / wanted[:, met] - 1).max() > 0.3, "any attention would pass"


def test_sinks_of_16_bits_make_the_probes_of_their_values():
    wide = dataclasses.replace(inputs(), sinks=jnp.asarray(SINKS, jnp.float32))
    narrow = dataclasses.replace(wide, sinks=wide.sinks.astype(jnp.bfloat16))
    one, other = (probes_of(given, 8, SPECIAL)["normalizers"] for given in (wide, narrow))
    np.testing.assert_array_equal(one, other)


def test_probes_are_the_last_tokens_and_others_spread_over_the_prompt():
    positions = np.asarray(probe_positions(jnp.asarray([100, 3, 0]), 8))
    np.testing.assert_array_equal(positions[0, :4], [99, 98, 97, 96])
    assert (np.diff(np.r_[0, positions[0, 4:] // 25]) >= 0).all()
    assert set(positions[0, 4:] // 25) == {0, 1, 2, 3}, "one in each quarter"
    assert (positions[1] < 3).all()
    assert (positions[2] == 0).all()


def test_codes_are_those_of_the_public_code():
    """Keys of both classes, one group for each channel; values normalized by channel, whose rows of
    two heads the public code joins."""
    data = golden("zipcache")
    important, others = data["important_ids"][0], data["unimportant_ids"][0]
    both = [np.concatenate([important[h], others[h]]) for h in range(2)]

    def codec(channels: int) -> ZipCodec:
        return ZipCodec("k", channels, 1, 50, (4, 2), 30, 1, "float32")

    keys = np.stack([data["K"][0, h, both[h]] for h in range(2)])[None]
    mask = jnp.broadcast_to(jnp.arange(50) < 30, (1, 2, 1, 50))
    own = codec(64)
    found = np.asarray(own._decoded(own._coded("k", jnp.asarray(keys), mask), mask))
    wanted = np.stack([data["k_deq"][0, h, both[h]] for h in range(2)])[None]
    compare_numbers(found, wanted)
    assert np.abs(found - np.roll(wanted, 1, axis=2)).max() > 0.1, "other tokens would pass"

    norm = np.sqrt(np.abs(data["V"]).max(axis=(0, 2)))
    np.testing.assert_allclose(norm.ravel(), data["v_channel_scale"].ravel(), rtol=1e-6)

    def joined(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([rows[0, h, both[h]] for h in range(2)], axis=-1)

    values = (joined(data["V"]) / norm.ravel())[None, None].astype(np.float32)
    own, of_both = codec(128), mask[:, :1]
    decoded = own._decoded(own._coded("v", jnp.asarray(values), of_both), of_both)
    compare_numbers(np.asarray(decoded)[0, 0] * norm.ravel(), joined(data["v_deq"]))
