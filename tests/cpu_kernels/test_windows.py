"""The C++ decode kernel with lower limits, bodies that are rings, soft caps and other scales: every
layout against attention by its definition."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import attention as native
from cpu_kernels import library
from tests.cpu_kernels.body_cases import BATCH, CASES, inputs
from tests.float64 import row_errors

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)

SCALE, CAP = 0.2, 0.8


class Seen(NamedTuple):
    """The tokens lower .. limits - 1 [B, T] of bodies of `written` tokens [B]."""

    lower: np.ndarray
    limits: np.ndarray
    written: np.ndarray
    ring: int

    def tokens(self) -> np.ndarray:
        """Return the token at each place of the ring, negative if there is none, [B, ring]."""
        newest = self.written[:, None] - 1
        return newest - (newest - np.arange(self.ring)) % self.ring


def seen_tokens(block: int, capacity: int, queries: int) -> Seen:
    """Return rows that are not full, that wrapped around twice, and that are full to the last."""
    ring, steps = capacity - block, np.arange(queries)
    written = np.array([2 * block, 2 * ring + block, ring])
    limits = written[:, None] - queries + 1 + steps
    lower = np.maximum(limits - ring + block // 2 + queries, 0)
    return Seen(lower, limits, written, ring)


def attend(case: str, arrays: tuple, q_before: np.ndarray, seen: Seen, capacity: int):
    k, v = CASES[case]
    q, keys, values = jax.tree.map(jnp.asarray, arrays)
    lower, limits, written = (jnp.asarray(a, jnp.int32) for a in seen[:3])
    ring = native.Ring(seen.ring, written, jnp.asarray(q_before) if k.rotated else None)
    options = {"lower": lower, "ring": ring, "scale": SCALE, "soft_cap": CAP}
    m, l, o = native.decode_attention(
        q, (k.body, keys), (v.body, values), limits, capacity=capacity, **options
    )
    return np.asarray(m), np.asarray(o / jnp.maximum(l, 1e-30))


def definition(q, q_before, k, v, seen: Seen, cap: float = CAP) -> tuple[np.ndarray, np.ndarray]:
    tokens, group = seen.tokens()[:, None], q.shape[2] // seen.limits.shape[1]
    mask = (tokens >= seen.lower[..., None]) & (tokens < seen.limits[..., None]) & (tokens >= 0)
    mask = np.tile(mask, (1, group, 1))[:, None]
    old = np.arange(seen.ring) >= seen.written[:, None] % seen.ring
    now, before = (np.einsum("bkrh,bksh->bkrs", x, k[:, :, : seen.ring]) for x in (q, q_before))
    scores = np.where(old[:, None, None], before, now) * SCALE
    scores = np.where(mask, cap * np.tanh(scores / cap), -1e30)
    m = scores.max(-1, keepdims=True)
    weights = np.exp(scores - m) * mask
    out = np.einsum("bkrs,bksh->bkrh", weights, v[:, :, : seen.ring])
    return m, out / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("case", CASES)
def test_every_layout_is_read_from_a_ring(case: str):
    k, v = CASES[case]
    block, queries = max(int(np.lcm(k.block, v.block)), 8), 1 + len(case) % 3
    capacity = (160 // block + 4) * block
    q, keys, values, k_hat, v_hat = inputs(case, 2, queries, capacity)
    q_before = q[:, :, ::-1] + 1 if k.rotated else q
    seen = seen_tokens(block, capacity, queries)
    m, out = attend(case, (q, keys, values), q_before, seen, capacity)
    want_m, want = definition(q, q_before, k_hat, v_hat, seen)
    np.testing.assert_allclose(m, want_m, rtol=k.error, atol=k.error)
    worst = row_errors(out, want).max()
    assert worst < k.error, f"worst relative error {worst:.1e}"
    for name, other in {
        "one token too few": seen._replace(lower=seen.lower + 1),
        "a ring of one block less": seen._replace(written=seen.written + block),
    }.items():
        wrong = definition(q, q_before, k_hat, v_hat, other)[1]
        assert row_errors(out, wrong)[1].min() > 10 * k.error, f"{name} passes"
    uncapped = definition(q, q_before, k_hat, v_hat, seen, 1e6)[1]
    assert row_errors(out, uncapped)[1].max() > 10 * k.error, "no cap passes"


@pytest.mark.parametrize("case", ["2 bits, 64", "dense fp32", "dense, head dim 80", "outliers"])
def test_tokens_that_no_query_sees_may_hold_anything(case: str):
    k, v = CASES[case]
    block = max(int(np.lcm(k.block, v.block)), 8)
    q, keys, values, *_ = inputs(case, 2, 1, 8 * block)
    seen = seen_tokens(block, 8 * block, 1)
    clean = attend(case, (q, keys, values), q, seen, 8 * block)
    tokens, hidden = seen.tokens(), np.ones((BATCH, 8 * block), bool)
    hidden[:, : seen.ring] = (tokens < seen.lower) | (tokens >= seen.limits) | (tokens < 0)

    def spoiled(side, stored: list[np.ndarray], hidden: np.ndarray) -> list[np.ndarray]:
        places = -2 if side.pool else -1  # residuals, or the last of scales, zero points and rows
        array = np.array(stored[places])
        axis = 1 if side.pool else 3 if side.affine == "channel groups" else 2
        whole = hidden.reshape(BATCH, array.shape[axis], -1).all(axis=2)
        whole = np.expand_dims(whole, [i for i in range(1, array.ndim) if i != axis])
        nan = np.float32(np.nan) if array.dtype == np.float32 else np.uint16(0x7FFF)
        array = np.where(whole, nan, array)
        return [*stored[:places], array, *stored[len(stored) + places + 1 :]]

    def attended(hidden: np.ndarray):
        stored = (spoiled(side, arrays, hidden) for side, arrays in ((k, keys), (v, values)))
        return attend(case, (q, *stored), q, seen, 8 * block)

    for one, other in zip(clean, attended(hidden), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(attended(~hidden)[1]).any(), "nothing was spoiled"


def test_rings_and_lower_limits_that_fit_no_arrays_read_nothing_outside():
    k, v = CASES["before RoPE"]
    q, keys, values, *_ = inputs("before RoPE", 2, 1, 96)
    arrays = q, keys, values
    maximum, full = np.full((BATCH, 1), 2**31 - 1), np.full((BATCH, 1), 96)
    for seen in (
        Seen(-maximum, maximum, maximum[:, 0], 64),
        Seen(maximum, maximum, maximum[:, 0], 64),
        Seen(-maximum, full, -maximum[:, 0], 64),
        Seen(full, -full, full[:, 0], 64),
    ):
        m, _ = attend("before RoPE", arrays, q, seen, 96)
        assert np.isfinite(m).all()
    for ring in (128, 48, -32):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a ring must be a whole number"):
            attend("before RoPE", arrays, q, Seen(full, full, full[:, 0], ring), 96)


def test_the_windows_of_a_cache_are_scaled_and_capped_too():
    k, v = CASES["2 bits, 64"]
    q, keys, values, *_ = inputs("2 bits, 64", 2, 1, 96)
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(2, BATCH, 2, 20, 64)).astype(np.float32)
    windows = native.ExactRows(
        jnp.asarray(q),
        jnp.ones((BATCH, 20), bool),
        *((jnp.asarray(side[:, :, :7]), jnp.asarray(side[:, :, 7:])) for side in rows),
    )
    q, keys, values = jax.tree.map(jnp.asarray, (q, keys, values))
    m, l, o = native.decode_attention(
        q,
        (k.body, keys),
        (v.body, values),
        jnp.zeros((BATCH, 1), jnp.int32),
        capacity=96,
        windows=windows,
        scale=SCALE,
        soft_cap=CAP,
    )
    everything = Seen(*(np.full((BATCH, 1), n) for n in (0, 20)), np.full(BATCH, 20), 20)
    want = definition(q, q, *rows, everything)[1]
    assert row_errors(o / l, want).max() < 1e-5
    uncapped = definition(q, q, *rows, everything, 1e6)[1]
    assert row_errors(o / l, uncapped).min() > 1e-3, "no cap passes"
