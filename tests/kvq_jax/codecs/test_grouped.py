"""Reading a packed body through attention's hooks: scores and weighted values are those of the
decoded rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.types.rope import Rope

BATCH, HEADS, TOKENS, ROWS = 2, 2, 96, 3
FORMATS = (
    GroupFormat(2, "asym", "tokens", 32, 128, 32),
    GroupFormat(
        4, "asym", "channels", 32, 64, 32
    ),  # rows of words that are joined before they are unpacked
    GroupFormat(8, "asym", "channels", 32, 64, 32),
    GroupFormat(2, "hybrid", "channels", 32, 64, 32),  # two plane sets, tokens that share words
    GroupFormat(2, "hybrid", "tokens", 32, 256, 32),
    GroupFormat(3, "asym", "channels", 8, 96, 16, "bfloat16"),
    GroupFormat(
        3, "sym", "tokens", 8, 80, 32, "float32"
    ),  # several groups among the tokens that share words
    GroupFormat(4, "sym", "channels", 4, 8, 8),  # a head dim below the width of a plane
    GroupFormat(8, "hybrid", "tokens", 16, 80, 16),
    GroupFormat(1, "sym", "tokens", 1, 64, 1),
)


def names(format: GroupFormat) -> str:
    groups = f"{format.scheme}{format.bits}_{format.axis}{format.group_size}"
    return f"{groups}_H{format.channels}_block{format.block}"


quantize = jax.jit(grouped_array.quantize, static_argnums=1)


@functools.cache
def body_of(format: GroupFormat, seed: int = 0) -> GroupedArray:
    rows = (
        np.random.default_rng(seed)
        .normal(size=(BATCH, HEADS, TOKENS, format.channels))
        .astype(np.float32)
    )
    return quantize(jnp.asarray(rows), format)


def decoded_by_definition(body: GroupedArray) -> np.ndarray:
    """Return code * scale + zero, one group at a time."""
    format, codes = body.format, np.asarray(grouped_array.codes(body)).astype(np.float32)
    scale, zero = np.asarray(body.scale).astype(np.float32), np.asarray(grouped_array.zeros(body))
    found = np.empty_like(codes)
    for g in range(scale.shape[2]):
        here = slice(g * format.group_size, (g + 1) * format.group_size)
        if format.axis == "channels":
            found[..., here] = codes[..., here] * scale[:, :, g, :, None] + zero[:, :, g, :, None]
        else:
            found[:, :, here] = codes[:, :, here] * scale[:, :, g, None] + zero[:, :, g, None]
    return found


def relative_error(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(
        np.max(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
    )


def reads(
    format: GroupFormat, body: GroupedArray, rope: Rope | None = None
) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """Return (scores, weighted values, queries, weights) of a codec whose body is `body`."""
    draw = np.random.default_rng(1)
    q = draw.normal(size=(BATCH, HEADS, ROWS, format.channels)).astype(np.float32)
    p = draw.uniform(size=(BATCH, HEADS, ROWS, TOKENS)).astype(np.float32)
    positions = jnp.broadcast_to(jnp.arange(TOKENS)[None], (BATCH, TOKENS))

    @jax.jit
    def run(q, p, body):
        k, v = GroupedCodec("k", format, pre_rope=rope is not None), GroupedCodec("v", format)
        scores = k.scores((), (), k.query((), (), q), body, positions, rope)
        return scores, v.weighted((), (), p, body, positions, None)

    return *run(q, p, body), q, p


@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_decode_is_code_times_scale_plus_zero(format: GroupFormat):
    body = body_of(format)
    error = relative_error(jax.jit(grouped_array.dequantize)(body), decoded_by_definition(body))
    assert error < 1e-6, f"decoded rows are off by {error}"


@pytest.mark.parametrize("format", FORMATS, ids=names)
def test_scores_and_weighted_values_are_those_of_the_decoded_rows(format: GroupFormat):
    body = body_of(format)
    rows = decoded_by_definition(body)
    scores, values, q, p = reads(format, body)
    expected_scores = np.einsum("bkrh,bkch->bkrc", q.astype(np.float64), rows)
    expected_values = np.einsum("bkrc,bkch->bkrh", p.astype(np.float64), rows)
    assert relative_error(scores, expected_scores) < 1e-5, (
        f"scores are off by {relative_error(scores, expected_scores)}"
    )
    assert relative_error(values, expected_values) < 1e-5, (
        f"weighted values are off by {relative_error(values, expected_values)}"
    )

    wrong = dataclasses.replace(
        body, scale=jnp.roll(body.scale, 1, axis=2 if body.scale.shape[2] > 1 else 3)
    )
    shifted, shifted_values, _, _ = reads(format, wrong)
    assert relative_error(shifted, expected_scores) > 1e-3, "scales of the neighbouring group pass"
    assert relative_error(shifted_values, expected_values) > 1e-3, (
        "scales of the neighbouring group pass"
    )


def test_keys_cached_before_rope_are_rotated_to_their_positions():
    format = GroupFormat(4, "asym", "tokens", 32, 64, 32)
    rope = Rope(
        jnp.asarray(10000.0 ** (-np.arange(32) / 32), jnp.float32), jnp.ones((), jnp.float32)
    )
    body = body_of(format)
    scores, _, q, _ = reads(format, body, rope)
    angles = np.arange(TOKENS)[:, None] * 10000.0 ** (-np.arange(32) / 32)
    pairs = (lambda rows: rows[..., :32] + 1j * rows[..., 32:])(
        decoded_by_definition(body)
    ) * np.exp(1j * angles)
    expected = np.einsum("bkrh,bkch->bkrc", q, np.concatenate([pairs.real, pairs.imag], axis=-1))
    assert relative_error(scores, expected) < 1e-5
    unrotated, _, _, _ = reads(format, body)
    assert relative_error(unrotated, expected) > 0.1, "keys without rotation pass"


def test_query_rows_of_a_head_share_its_keys_and_values():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 5, 8)), jnp.float32)
    q = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 3, 8)), jnp.float32)
    scores = dot_rows(q, rows)
    assert scores.shape == (1, 2, 3, 5)
    one_by_one = np.stack(
        [[np.asarray(rows[0, k]) @ np.asarray(q[0, k, r]) for r in range(3)] for k in range(2)]
    )[None]
    assert relative_error(scores, one_by_one) < 1e-6
    assert (
        relative_error(
            weigh_rows(scores, rows),
            np.einsum("bkrc,bkch->bkrh", np.asarray(scores), np.asarray(rows)),
        )
        < 1e-6
    )
