"""What each method's numbers cost, pinned in both directions, and how many bits it stores."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.layer.plan import LayerPlan, by_side
from tests.float64 import softmax
from tests.kvq_jax.layer_runs import (
    STEP,
    Sequences,
    decode_vectors,
    empty,
    parameters_of,
    quick_jit,
    run,
    sequences,
)
from tests.methods_table import ONE_OF_EACH, MethodCase, cases


def exact_attention(tokens: Sequences, at: int) -> np.ndarray:
    """Return softmax(q k^T / sqrt(H)) v in float64 over tokens 0 .. at, for the query at `at`: [B,
    N, H]."""
    b, n, _, h = tokens.q.shape
    k, v = (a[:, :, : at + 1].astype(np.float64) for a in (tokens.k_rot, tokens.v))
    q = tokens.q[:, :, at].astype(np.float64).reshape(b, k.shape[1], -1, h)
    weights = softmax(np.einsum("bkgh,bksh->bkgs", q, k) / np.sqrt(h))
    return np.einsum("bkgs,bksh->bkgh", weights, v).reshape(b, n, h)


@functools.partial(quick_jit, static_argnums=0)
def attended_by_codecs(
    plan: LayerPlan, params: Any, stats: Any, inputs: kvq.types.LayerInputs
) -> jax.Array:
    """Return attention of the last STEP tokens by the codecs' own functions, without a cache: each
    query reads the body that a cache has at its turn, and all other tokens exact."""
    (batch, heads, tokens, h), kv_heads = inputs.q_rot.shape, inputs.v.shape[1]
    regions, params = plan.regions, by_side(params)
    sink, aging = regions.sink, slice(regions.sink, regions.sink + regions.body_capacity)
    positions = inputs.positions[:, aging]
    k, v = (
        codec.quantize(p, s, codec.rows(p, inputs)[:, :, aging], TokensAt(positions, prefill=False))
        for codec, p, s in zip((plan.k, plan.v), params, (stats[0], stats[-1]), strict=True)
    )
    token, newest = np.arange(tokens)[None], np.arange(tokens - STEP, tokens)[:, None]
    body = np.array([[regions.aged_tokens(int(n) + 1)] for (n,) in newest])
    coded = (token >= sink) & (token < sink + body)  # [T, S]
    coded, seen = (
        np.tile(mask, (heads // kv_heads, 1))[None, None] for mask in (coded, token <= newest)
    )
    q = inputs.q_rot[:, :, -STEP:].reshape(batch, kv_heads, -1, h)
    query = plan.k.query(params[0], stats[0], q)
    scores = plan.k.scores(params[0], stats[0], query, k, positions, inputs.rope)
    scores = jnp.pad(scores, [(0, 0)] * 3 + [(sink, tokens - aging.stop)])
    scores = jnp.where(coded, scores, q @ jnp.swapaxes(inputs.k_rot, 2, 3)) * h**-0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    of_body = jnp.where(coded, weights, 0)[..., aging]
    out = plan.v.weighted(params[1], stats[-1], of_body, v, positions, inputs.rope)
    return (out + jnp.where(coded, 0, weights) @ inputs.v).reshape(batch, heads, STEP, h)


@cases(every=True)
def test_attention_error_is_the_pinned_one(case: MethodCase):
    """Relative error of the last 8 outputs of full rows, half of them prompt and half decoded.

    A variant of a row that runs through a layer here is read by its codecs alone, a fraction of
    what compiles. Variants whose codes or statistics depend on how tokens come do run.
    """
    plan, state = empty(case.spec)
    tokens = sequences()
    full = np.full(8, plan.regions.capacity, np.int32)
    half = full // 2
    if (
        case in ONE_OF_EACH
        or not case.same_codes_in_decode
        or plan.cross_layer is not None
        or "channel_ranges" in case.spec
    ):
        outputs, _ = run(plan, state, tokens, half, full)
        outputs = outputs[:, :, -STEP:]
    else:
        prompt = tokens.window(0 * full, half, int(half[0]))
        sides = zip(plan.codecs, by_side(parameters_of(plan)), strict=False)
        stats = tuple(codec.statistics.of(params, prompt) for codec, params in sides)
        inputs = tokens.window(0 * full, full, plan.regions.capacity)
        outputs = np.asarray(attended_by_codecs(plan, parameters_of(plan), stats, inputs))
    at = range(plan.regions.capacity - STEP, plan.regions.capacity)
    exact = np.stack([exact_attention(tokens, t) for t in at], axis=2)
    error = np.linalg.norm(outputs - exact) / np.linalg.norm(exact)
    if case.attention_error == 0:
        assert error <= 1e-5
    else:
        assert error == pytest.approx(case.attention_error, rel=0.2), f"measured {error:.4f}"


@cases(every=True)
def test_stored_bits_of_the_body_are_the_pinned_ones(case: MethodCase):
    assert kvq.size.body_bits_per_element(case.spec, CacheDims(2, 4, 2, 64, 256)) == pytest.approx(
        case.body_bits, rel=1e-12
    )


@cases()
def test_roundtrip_gives_what_the_body_would_return(case: MethodCase):
    plan, state = empty(case.spec)
    tokens, full = sequences(), np.full(8, plan.regions.capacity, np.int32)
    sink, body = plan.regions.sink, plan.regions.body_capacity
    inputs = tokens.window(np.zeros(8, np.int32), full, plan.regions.capacity)
    k_hat, v_hat, _ = kvq.cache.roundtrip_layer(
        case.spec, inputs, parameters_of(plan), layer=1, carry=tokens.below(plan, whole=True)
    )
    assert k_hat.shape == v_hat.shape == tokens.v.shape
    for found, given in ((k_hat, tokens.k_rot), (v_hat, tokens.v)):
        error = np.linalg.norm(np.asarray(found) - given) / np.linalg.norm(given)
        assert error <= case.roundtrip_error, f"relative error {error:.2f}"
    if sink == 0 and body:  # groups of the body start where those of the whole sequence do
        _, after = run(plan, state, tokens, full, full)
        read = decode_vectors(
            plan, parameters_of(plan), after, jnp.asarray(full), tokens.rope, tokens.below(plan)
        )
        for name, one, other in zip(("keys", "values"), read, (k_hat, v_hat), strict=True):
            found, wanted = (np.asarray(rows)[:, :, :body] for rows in (one, other))
            np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)
            assert np.abs(found[:, :, 1:] - wanted[:, :, :-1]).max() > 0.1, (
                f"{name} of the token before would pass"
            )
