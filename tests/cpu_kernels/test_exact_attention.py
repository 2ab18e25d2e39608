"""The C++ kernel of prompts: attention by its definition, whatever nobody sees, and the rows beside
a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import library
from cpu_kernels.exact_attention import DTYPES, exact_attention
from tests.float64 import softmax

if reason := library.unavailable():
    pytest.skip(reason, allow_module_level=True)

HEADS = 2


def prompt(group: int, tokens: int, old: int, channels: int, dtype: str, batch: int = 2):
    """Return q, keys, values, seen and counts of a batch whose second row is padded by 3."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, HEADS, group * tokens, channels)).astype(np.float32) * 2
    keys, values = (
        np.asarray(jnp.asarray(rng.normal(size=(batch, HEADS, old + tokens, channels)), dtype))
        for _ in "kv"
    )
    real = np.maximum(tokens - 3 * np.arange(batch), 0)
    counts = np.minimum(np.arange(1, tokens + 1), real[:, None]).astype(np.int32)
    return q, keys, values, rng.random((batch, old)) < 0.6, counts


def mask_of(seen: np.ndarray, counts: np.ndarray, new: int) -> np.ndarray:
    """Return the rows that queries see, [B, T, E]."""
    old = np.broadcast_to(seen[:, None], (*counts.shape, seen.shape[1]))
    return np.concatenate([old, np.arange(new) < counts[..., None]], axis=2)


def definition(q, keys, values, seen, counts) -> np.ndarray:
    mask = mask_of(seen, counts, keys.shape[2] - seen.shape[1])
    mask = np.tile(mask, (1, q.shape[2] // counts.shape[1], 1))[:, None]
    scores = np.einsum("bkrh,bkeh->bkre", q.astype(float), keys.astype(float))
    weights = softmax(scores * q.shape[3] ** -0.5, mask)
    return np.einsum("bkre,bkeh->bkrh", weights, values.astype(float))


@jax.jit
def attention(q, keys, values, seen, counts):
    reach, queries = jnp.where(seen, counts.shape[1], 0), jnp.full(len(q), counts.shape[1])
    m, l, o = exact_attention(q, keys, values, reach, counts, queries, scale=q.shape[3] ** -0.5)
    return m, l, o / jnp.maximum(l, 1e-30)


def relative_error(actual: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(actual - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("group", "tokens", "old", "channels", "dtype"),
    [
        (3, 70, 40, 64, "float32"),
        (1, 5, 700, 80, "float32"),
        (4, 300, 0, 128, "bfloat16"),
        (7, 257, 33, 96, "float16"),
        (2, 1, 3, 8, "float32"),
        (2, 33, 20, 20, "bfloat16"),
        (1, 520, 300, 256, "float32"),
        (128, 9, 20, 64, "float32"),
        (500, 3, 300, 20, "bfloat16"),
    ],
)
def test_a_prompt_attends_as_attention_is_defined(
    group: int, tokens: int, old: int, channels: int, dtype: str
):
    arrays = prompt(group, tokens, old, channels, dtype)
    q, keys, values, seen, counts = arrays
    m, l, out = map(np.asarray, attention(*arrays))
    assert relative_error(out, definition(*arrays)) < 2e-6
    if tokens > 1:
        later = definition(q, keys, values, seen, np.maximum(counts - 1, 0))
        assert relative_error(out, later) > 1e-4, "a token left out passes"
    nothing = ~mask_of(seen, counts, tokens).any(axis=2)
    empty = np.tile(nothing, (1, group))[:, None] & np.ones((1, HEADS, 1), bool)
    assert np.all(m[empty] == np.float32(-1e30))
    assert not l[empty].any()
    assert not out[empty].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_nobody_sees_may_hold_anything(dtype: str):
    q, keys, values, seen, counts = prompt(3, 40, 50, 64, dtype)
    clean = attention(q, keys, values, seen, counts)
    hidden = ~mask_of(seen, counts, 40).any(axis=1)[:, None, :, None]
    spoiled = [np.where(hidden, np.asarray(np.nan, side.dtype), side) for side in (keys, values)]
    for one, other in zip(clean, attention(q, *spoiled, seen, counts), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(attention(q, *spoiled, ~seen, counts)[2]).any(), "nothing was hidden"


def test_a_row_has_the_same_bits_alone_and_in_company():
    q, keys, values, seen, counts = prompt(3, 130, 20, 64, "float32")
    together = np.asarray(attention(q, keys, values, seen, counts)[2])
    for b in range(2):
        here = slice(b, b + 1)
        alone = attention(q[here], keys[here], values[here], seen[here], counts[here])[2]
        np.testing.assert_array_equal(alone[0], together[b])
    by_head = q.reshape(2, HEADS, 3, 130, 64)[:, :, :, :50].reshape(2, HEADS, 150, 64)
    shorter = np.asarray(
        attention(by_head, keys[:, :, :70], values[:, :, :70], seen, counts[:, :50])[2]
    )
    want = together.reshape(2, HEADS, 3, 130, 64)[:, :, :, :50].reshape(shorter.shape)
    np.testing.assert_array_equal(shorter, want)
    assert not np.array_equal(together[0], together[1])


@pytest.mark.parametrize("row", [0, 7, 20, 39])
def test_nan_in_a_seen_row_reaches_the_queries_that_see_it_alone(row: int):
    q, keys, values, seen, counts = prompt(1, 40, 0, 64, "float32", batch=1)
    keys = keys.copy()
    keys[0, :, row] = np.nan
    out = np.asarray(attention(q, keys, values, seen, counts)[2])
    assert np.isnan(out[0, :, row:]).all()
    assert np.isfinite(out[0, :, :row]).all()


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_a_query_of_nan_gets_nan_and_no_other_does(tokens: int):
    q, keys, values, seen, counts = prompt(1, tokens, 9, 64, "float32", batch=1)
    q[0, 1, -1] = np.nan
    _, total, out = attention(q, keys, values, seen, counts)
    assert np.isnan(total[0, 1, -1]).all(), "the softmax's sum of a query of NaN is a number"
    assert np.isnan(out).sum() == np.isnan(out[0, 1, -1]).sum() == 64


def test_rows_whose_scores_are_minus_infinity_weigh_nothing():
    q, keys, values, seen, counts = prompt(1, 40, 300, 64, "float32", batch=1)
    keys = keys.copy()
    keys[0, 0, :300], keys[0, 1] = -np.inf, -np.inf
    out = np.asarray(attention(np.abs(q), keys, values, seen, counts)[2])
    without = attention(np.abs(q), keys, values, np.zeros_like(seen), counts)[2]
    np.testing.assert_array_equal(out[0, 0], without[0, 0])
    assert not out[0, 1].any()
    assert out[0, 0].all()


def test_arrays_that_do_not_fit_are_an_error_of_xla():
    q, keys, values, seen, counts = prompt(1, 8, 4, 16, "float32")
    with pytest.raises(Exception, match="keys and values must be of fp32"):
        attention(q, keys, values.astype(np.float16), seen, counts)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": -1}, {"soft_cap": 0}, {"soft_cap": -5}]
)
def test_windows_and_soft_caps_that_are_not_positive_are_an_error(options: dict[str, int]):
    q, keys, values, seen, counts = map(jnp.asarray, prompt(1, 8, 4, 16, "float32"))
    reach, queries = jnp.where(seen, 8, 0), jnp.full(2, 8)
    with pytest.raises(ValueError, match="must be"):
        exact_attention(q, keys, values, reach, counts, queries, scale=0.1, **options)


@pytest.mark.parametrize(("tokens", "dtype"), [(5, "float32"), (140, "bfloat16")])
@pytest.mark.parametrize("padding", [0, 1, 3, 5])
def test_queries_that_are_padding_see_nothing_and_change_no_bit_of_the_others(
    tokens: int, dtype: str, padding: int
):
    q, keys, values, seen, counts = prompt(3, tokens, 20, 64, dtype)
    scale, real = q.shape[3] ** -0.5, tokens - padding
    reach = np.where(seen, tokens, 0).astype(np.int32)
    by_head = q.reshape(2, HEADS, 3, tokens, 64).copy()
    by_head[1, :, :, real:] = np.nan
    others = [jnp.asarray(a) for a in (keys, values, reach, counts)]
    q, padded = jnp.asarray(q), jnp.asarray(by_head.reshape(q.shape))
    whole = exact_attention(q, *others, jnp.full(2, tokens), scale=scale)
    parts = exact_attention(padded, *others, jnp.array([tokens, real]), scale=scale)
    for part, every, nothing in zip(parts, whole, (-1e30, 0, 0), strict=True):
        part, every = (np.asarray(a).reshape(2, HEADS, 3, tokens, -1) for a in (part, every))
        np.testing.assert_array_equal(part[0], every[0])
        np.testing.assert_array_equal(part[1, :, :, :real], every[1, :, :, :real])
        np.testing.assert_array_equal(part[1, :, :, real:], np.float32(nothing))
        assert (every[1] != np.float32(nothing)).all(), "queries that are not padding see nothing"


@jax.jit
def windowed(q, keys, values, reach, counts):
    queries = jnp.full(len(q), counts.shape[1])
    options = {"scale": q.shape[3] ** -0.5, "window": WINDOW, "soft_cap": CAP}
    m, l, o = exact_attention(q, keys, values, reach, counts, queries, **options)
    return o / jnp.maximum(l, 1e-30)


WINDOW, CAP = 20, 2.0


def windowed_definition(q, keys, values, reach, counts, window: int, cap: float) -> np.ndarray:
    new, tokens = keys.shape[2] - reach.shape[1], np.arange(counts.shape[1])[:, None]
    old = reach[:, None] > tokens
    fresh = (np.arange(new) < counts[..., None]) & (np.arange(new) > tokens - window)
    mask = np.tile(np.concatenate([old, fresh], axis=2), (1, q.shape[2] // len(tokens), 1))[:, None]
    scores = np.einsum("bkrh,bkeh->bkre", q.astype(float), keys.astype(float)) * q.shape[3] ** -0.5
    weights = softmax(cap * np.tanh(scores / cap), mask)
    return np.einsum("bkre,bkeh->bkrh", weights, values.astype(float))


@pytest.mark.parametrize(
    ("group", "tokens", "old", "channels", "dtype"),
    [(3, 70, 40, 64, "float32"), (4, 300, 0, 80, "bfloat16"), (1, 610, 300, 128, "float32")],
)
def test_windows_and_soft_caps_are_as_defined(
    group: int, tokens: int, old: int, channels: int, dtype: str
):
    q, keys, values, seen, counts = prompt(group, tokens, old, channels, dtype)
    reach = np.where(seen, np.arange(old)[::-1] * 7 % (tokens + 5), 0).astype(np.int32)
    arrays = q, keys, values, reach, counts
    out = np.asarray(windowed(*arrays))
    assert relative_error(out, windowed_definition(*arrays, WINDOW, CAP)) < 2e-6
    for window, cap in ((WINDOW + 1, CAP), (WINDOW - 1, CAP), (WINDOW, 1e6)):
        wrong = windowed_definition(*arrays, window, cap)
        assert relative_error(out, wrong) > 1e-4, f"{window=}, {cap=} passes"
    if old:
        later = windowed_definition(q, keys, values, reach - 1, counts, WINDOW, CAP)
        assert relative_error(out, later) > 1e-4, "older rows that are left too early pass"
    hidden = np.concatenate([reach == 0, np.zeros((2, tokens), bool)], axis=1)
    hidden[1, old + tokens - 3 :] = True
    nan = np.asarray(np.nan, keys.dtype)
    spoiled = [np.where(hidden[:, None, :, None], nan, side) for side in (keys, values)]
    np.testing.assert_array_equal(windowed(q, *spoiled, reach, counts), out)
