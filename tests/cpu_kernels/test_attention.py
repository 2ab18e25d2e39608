"""The C++ kernel by itself: every layout of words against attention by its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import attention as native
from cpu_kernels import library
from tests.cpu_kernels.body_cases import BATCH, CASES, HEADS, decode_attention, inputs
from tests.cpu_kernels.random_bodies import attention
from tests.exhaustive import some
from tests.float64 import rotated, row_errors

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)


SHAPES = (1, 1), (7, 1), (2, 3)  # (query heads for each KV head, new tokens)
EVERY = [(case, *shape) for case in CASES for shape in SHAPES]


@pytest.mark.parametrize(("case", "group", "tokens"), some(EVERY, EVERY[::2]))
def test_every_layout_is_read_as_it_was_written(case: str, group: int, tokens: int):
    k, v = CASES[case]
    block = int(np.lcm(k.block, v.block))
    capacity = max((1100 if case == "2 bits, 64" else 120) // block, 1) * block
    q, keys, values, k_hat, v_hat = inputs(case, group, tokens, capacity)
    limits = np.array(
        [[0] * tokens, range(capacity - tokens + 1, capacity + 1), range(33, 33 + tokens)], np.int32
    )
    m, l, o = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=capacity)
    want_m, want_l, want_o = attention(q, k_hat, v_hat, limits)
    assert np.all(np.asarray(o)[0] == 0)
    assert np.all(np.asarray(l)[0] == 0)
    assert np.all(np.asarray(m)[0] == np.float32(-1e30)), "rows that see nothing"
    np.testing.assert_allclose(m[1:], want_m[1:], rtol=k.error, atol=k.error)
    actual, want = np.asarray(o)[1:] / np.asarray(l)[1:], want_o[1:] / want_l[1:]
    assert row_errors(actual, want).max() < k.error, (
        f"worst relative error {row_errors(actual, want).max():.1e}"
    )
    fewer = attention(q, k_hat, v_hat, limits - 1)
    assert row_errors(actual, (fewer[2] / np.maximum(fewer[1], 1e-30))[1:]).min() > 10 * k.error, (
        "one token too few passes"
    )


def test_every_head_has_its_own_matrix_in_all_tasks_and_rows():
    """A thread that goes on with the same head keeps its matrix."""
    k, v = CASES["runs of mixed keys"]
    capacity = 65 * k.block  # three tasks of each head
    q, keys, values, k_hat, v_hat = inputs("runs of mixed keys", 1, 1, capacity)
    limits = np.full((BATCH, 1), capacity, np.int32)
    _, l, o = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=capacity)
    _, want_l, want_o = attention(q, k_hat, v_hat, limits)
    error = row_errors(np.asarray(o) / np.asarray(l), want_o / want_l)
    assert error.max() < k.error, f"worst relative error {error.max():.1e}"
    _, want_l, want_o = attention(q, k_hat[:, ::-1], v_hat, limits)
    error = row_errors(np.asarray(o) / np.asarray(l), want_o / want_l)
    assert error.min() > 10 * k.error, "keys of another head pass"


@pytest.mark.parametrize("dtype", native.WINDOW_DTYPES)
@pytest.mark.parametrize(
    ("case", "slots"),
    [
        ("2 bits, 64", (32, 130)),
        ("head dim 80", (0, 7)),
        ("head dim 8", (5, 129)),
        ("runs", (3, 129)),
        ("runs of mixed keys, head dim 12", (5, 8)),
    ],
)
def test_windows_are_attended_to_with_the_body(case: str, slots: tuple[int, int], dtype: str):
    k, v = CASES[case]
    q, keys, values, k_hat, v_hat = inputs(case, 6, 1, 96)
    limits = np.array([[0], [96], [32]], np.int32)
    rng = np.random.default_rng(7)
    seen = rng.random((BATCH, sum(slots))) < 0.7
    seen[:, :3], seen[:, -1] = True, False
    rows = [
        np.asarray(
            jnp.asarray(rng.normal(size=(BATCH, HEADS, sum(slots), k.channels)), dtype), np.float32
        )
        for _ in range(2)
    ]
    # Not the query of the body, as in a method with a key norm.
    window_q = rng.normal(size=q.shape).astype(np.float32)
    # Keys before RoPE are rotated by the tables of their slots.
    angles = rng.uniform(-9, 9, (BATCH, sum(slots), k.channels // 2)) * k.rotated
    turns = [1.25 * np.cos(angles), 1.25 * np.sin(angles)] if k.rotated else []
    window_k = rotated(rows[0], angles[:, None], 1.25) if k.rotated else rows[0]

    def attend(seen: np.ndarray, stored: list[np.ndarray]) -> np.ndarray:
        parts = [
            tuple(jnp.asarray(part, dtype) for part in np.split(side, [slots[0]], axis=2))
            for side in stored
        ]
        windows = native.ExactRows(
            jnp.asarray(window_q),
            jnp.asarray(seen),
            *parts,
            tuple(jnp.asarray(table, jnp.float32) for table in turns),
        )
        (kb, k_arrays), (vb, v_arrays) = (k.body, keys), (v.body, values)
        arrays = jax.tree.map(jnp.asarray, (q, k_arrays, v_arrays, limits))
        m, l, o = native.decode_attention(
            arrays[0], (kb, arrays[1]), (vb, arrays[2]), arrays[3], capacity=96, windows=windows
        )
        return np.asarray(o / l)

    spoiled = [np.where(seen[:, None, :, None], side, np.nan) for side in rows]
    actual = attend(seen, spoiled)
    body = attention(q, k_hat, v_hat, limits)
    scores = np.where(
        seen[:, None, None],
        np.einsum("bkrh,bksh->bkrs", window_q.astype(np.float64), window_k) * k.channels**-0.5,
        -np.inf,
    )
    m = np.maximum(body[0], scores.max(-1, keepdims=True))
    weights, shrink = np.exp(scores - m), np.exp(body[0] - m)
    want = (np.einsum("bkrs,bksh->bkrh", weights, rows[1]) + shrink * body[2]) / (
        weights.sum(-1, keepdims=True) + shrink * body[1]
    )
    assert row_errors(actual, want).max() < k.error, (
        f"worst relative error {row_errors(actual, want).max():.1e}"
    )
    fewer = seen.copy()
    fewer[:, 0] = False
    assert row_errors(attend(fewer, spoiled), want).max() > 10 * k.error, "a token left out passes"
    if k.rotated:
        turns.reverse()
        assert row_errors(attend(seen, spoiled), want).max() > 10 * k.error, "wrong turns pass"
        turns.reverse()
    spoiled[0][1, 0, 0] = np.nan
    broken = np.isnan(attend(seen, spoiled)).all(axis=(-2, -1))
    assert broken[1, 0], "NaN in a row that is seen is dropped"
    assert broken.sum() == 1, "NaN reaches other heads or rows"


def test_a_query_of_nan_gets_nan_and_no_other_does():
    k, v = CASES["2 bits, 64"]
    q, keys, values, *_ = inputs("2 bits, 64", 1, 1, 160)
    q[1, 0] = np.nan
    limits = np.full((BATCH, 1), 150, np.int32)
    _, total, _ = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=160)
    broken = np.isnan(total).reshape(BATCH, HEADS)
    assert broken[1, 0], "the softmax's sum of a query of NaN is a number"
    assert broken.sum() == 1, "NaN reaches other heads or rows"


def test_a_matrix_of_keys_with_nan_or_infinity_breaks_its_head_alone():
    """The kernel rounds the matrix to integers, which cannot say NaN."""
    k, v = CASES["runs of mixed keys"]
    q, keys, values, *_ = inputs("runs of mixed keys", 2, 1, 96)
    square = (HEADS, k.channels, k.channels)
    matrix = next(i for i, array in enumerate(keys) if array.shape == square)
    limits = np.full((BATCH, 1), 96, np.int32)
    for entry in (np.nan, np.inf):
        keys[matrix] = keys[matrix].copy()
        keys[matrix][1, 5, 7] = entry
        _, total, _ = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
        broken = np.isnan(total).all(axis=(-2, -1))
        assert broken[:, 1].all(), f"a matrix with {entry} gives numbers"
        assert not np.isnan(total)[:, 0].any(), f"{entry} reaches the other head"


def test_tokens_whose_scores_are_minus_infinity_weigh_nothing():
    k, v = CASES["dense fp32"]
    q, keys, values, *_ = inputs("dense fp32", 2, 1, 1100)
    q, keys[0] = np.abs(q), keys[0].copy()
    keys[0][0, :, :1050], keys[0][1] = -np.inf, -np.inf  # the tokens of a task, and all of them
    limits = np.full((BATCH, 1), 1100, np.int32)
    m, l, o = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=1100)
    want = attention(q[:1], keys[0][:1, :, 1050:], values[0][:1, :, 1050:], limits[:1] - 1050)
    assert row_errors(np.asarray(o / l)[0], want[2][0] / want[1][0]).max() < 1e-5
    assert np.all(np.asarray(m)[1] == np.float32(-1e30))
    assert not np.asarray(l)[1].any()
    assert not np.asarray(o)[1].any()


def test_places_outside_the_row_are_not_written_to():
    k, v = CASES["runs"]
    q, keys, values, *_ = inputs("runs", 4, 1, 96)
    places = next(i for i, array in enumerate(keys) if array.dtype == np.int32)
    for place in (-(2**31), 2**31 - 1):
        keys[places] = np.full_like(keys[places], place)
        m, *_ = decode_attention(
            q, (k.body, keys), (v.body, values), np.full((BATCH, 1), 96, np.int32), capacity=96
        )
        assert np.all(np.isfinite(m))


def test_no_outlier_is_written_outside_the_vectors():
    k, v = CASES["outliers"]
    q, keys, values, *_ = inputs("outliers", 4, 1, 96)
    for stored in (keys, values):
        stored[-3], stored[-1] = np.full_like(stored[-3], 65535), np.full_like(stored[-1], 65535)
    limits = np.array([[96], [12], [0]], np.int32)
    m, l, _ = decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    assert np.all(np.isfinite(m))
    assert np.all(np.asarray(l)[2] == 0)


def test_limits_outside_the_capacity_read_no_more_than_it():
    k, v = CASES["2 bits, 64"]
    q, keys, values, *_ = inputs("2 bits, 64", 1, 1, 96)
    call = jax.jit(
        lambda limits: decode_attention(q, (k.body, keys), (v.body, values), limits, capacity=96)
    )
    whole, more = (call(jnp.full((BATCH, 1), limit, jnp.int32)) for limit in (96, 2**31 - 1))
    np.testing.assert_array_equal(whole[2], more[2])
    assert np.all(np.asarray(call(jnp.full((BATCH, 1), -5, jnp.int32))[2]) == 0)
