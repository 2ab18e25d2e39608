"""Tests of keys and values that go through the body of a cache and come back."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq

NAMES = ("k", "v", "k of the rest", "v of the rest")
METHODS = ("kivi:bits=2", "gear:bits=2", "zipcache", "kvarn", "oscar_omni", "squat:bits=2")


def errors(spec: str, tokens: int) -> tuple[float, ...]:
    """Return the relative errors of keys and values over the whole blocks of a prompt of that many
    tokens, then over the rest."""
    rng = np.random.default_rng(3)
    k, v, q = jnp.asarray(rng.normal(size=(3, 1, 2, 512, 64)), jnp.float32)[..., :tokens, :]
    hats = kvq.roundtrip(spec, k, v, q, layout="BNTH")
    whole = 128 * (tokens // 128)
    return tuple(
        float(jnp.linalg.norm((hat - x)[..., part, :]) / jnp.linalg.norm(x[..., part, :]))
        for part in (slice(whole), slice(whole, None))
        for hat, x in zip(hats, (k, v), strict=True)
    )


@pytest.mark.parametrize("spec", METHODS)
def test_tokens_of_a_block_that_the_prompt_does_not_fill_are_coded_like_the_others(spec):
    """Copies of one token would be coded without an error, or take the block's scales."""
    usual = errors(spec, 256)[:2]
    measured = errors(spec, 258)
    for name, error, expected in zip(NAMES, measured, 2 * usual, strict=True):
        assert 0.5 * expected < error < 1.6 * expected, f"{name}: {error:.3f}, not {expected:.3f}"
