"""The kernel that attends to the full-precision windows, interpreted, against float64; what slots without a token hold is never used."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.merge import merged
from pallas_kernels.decode_attention.partial_attention import PartialAttention
from pallas_kernels.decode_attention.windows import attend_windows
from pallas_kernels.launch import LAUNCH, Launch
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS, GROUP, CHANNELS = 2, 3, 64
RECENT, BLOCK = 68, 32  # a ring of 100 slots: whole tiles do not fill it
TOKENS = np.array([0, 1, 17, 90, 101, 132, 400], np.int32)
SINKS = (0, 20, 32)


@functools.partial(jax.jit, static_argnames="launch")
def attend(q, sink, ring, tokens, limits, launch=LAUNCH):
    return merged([attend_windows(q, sink, ring, tokens, limits, launch=launch)], GROUP, launch=launch)


def body_tokens(tokens: np.ndarray, sink: int) -> np.ndarray:
    return np.maximum(tokens - sink - RECENT, 0) // BLOCK * BLOCK


def rows(sink: int, dtype: str = "bfloat16") -> tuple[jax.Array, tuple, tuple, np.ndarray]:
    """Return queries [B, K, G, H], the windows with NaN in slots that hold no token, and all keys and values [2, B, K, S, H]."""
    rng, slots = np.random.default_rng(3), RECENT + BLOCK
    everything = rng.normal(size=(2, len(TOKENS), HEADS, int(TOKENS.max()), CHANNELS)).astype(np.float32)
    first = np.full((2, len(TOKENS), HEADS, sink, CHANNELS), np.nan, np.float32)
    ring = np.full((2, len(TOKENS), HEADS, slots, CHANNELS), np.nan, np.float32)
    for b, n in enumerate(TOKENS):
        first[:, b, :, : min(n, sink)] = everything[:, b, :, : min(n, sink)]
        for p in range(max(sink, n - slots), n):
            ring[:, b, :, (p - sink) % slots] = everything[:, b, :, p]
    q = jnp.asarray(rng.normal(size=(len(TOKENS), HEADS, GROUP, CHANNELS)) * 2, jnp.float32)
    stored = [tuple(jnp.asarray(side, dtype) for side in window) for window in (first, ring)]
    return q, stored[0], stored[1], np.asarray(jnp.asarray(everything, dtype).astype(jnp.float32), np.float64)


def expected(q: jax.Array, everything: np.ndarray, sink: int) -> PartialAttention:
    """Return m, l, o over the tokens that are not in the body, in float64."""
    scores = np.einsum("bkgh,bksh->bkgs", np.asarray(q.astype(jnp.bfloat16), np.float64), everything[0]) / np.sqrt(CHANNELS)
    at, body = np.arange(everything.shape[3]), body_tokens(TOKENS, sink)
    exact = (at < TOKENS[:, None]) & ((at < sink) | (at >= sink + body[:, None]))
    scores = np.where(exact[:, None, None], scores, -np.inf)
    m = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - m)
    return PartialAttention(m, weights.sum(-1, keepdims=True), np.einsum("bkgs,bksh->bkgh", weights, everything[1]))


def wrong_in(found: PartialAttention, wanted: PartialAttention) -> str | None:
    """Compare the rows that have tokens: all but the first."""
    a, b = (np.asarray(part.m[1:]) + np.log(np.maximum(part.l[1:], 1e-30)) for part in (found, wanted))
    if not np.allclose(a, b, rtol=1e-2, atol=1e-2):
        return f"the logarithm of the sum of all weights is off by {np.abs(a - b).max():.1e}"
    out, other = (np.asarray(part.o) / np.maximum(np.asarray(part.l), 1e-30) for part in (found, wanted))
    errors = row_errors(out[1:], other[1:])
    return f"o is off by {errors.max():.1e}, by row {errors.max(axis=(1, 2))}" if errors.max() > 1e-2 else None


@pytest.mark.parametrize("sink", SINKS)
def test_attention_is_that_of_the_tokens_outside_the_body(sink):
    check(sink, Launch(interpret=True))


def check(sink: int, launch: Launch) -> None:
    q, first, ring, everything = rows(sink)
    limits = body_tokens(TOKENS, sink)
    found, wanted = attend(q, first, ring, TOKENS, limits, launch=launch), expected(q, everything, sink)
    assert (wrong := wrong_in(found, wanted)) is None, wrong
    assert not np.asarray(found.l[0]).any(), "a row without tokens has seen some"
    assert limits.max() > 0, "no row has a body: nothing would show what is read from it"
    late = attend(q, first, ring, TOKENS, limits + BLOCK, launch=launch)
    assert wrong_in(late, wanted), "a window that begins one block later would pass"
    early = attend(q, first, ring, np.maximum(TOKENS - 1, 0), limits, launch=launch)
    assert wrong_in(early, wanted), "a window without the newest token would pass"


def test_windows_that_kernels_cannot_read_are_refused():
    q, first, ring, _ = rows(20)
    with pytest.raises(ValueError, match="windows in float32"):
        attend(q, *(tuple(a.astype(jnp.float32) for a in window) for window in (first, ring)), TOKENS, TOKENS)
    with pytest.raises(ValueError, match="windows of 12 and 100 slots: kernels read none or at least 16"):
        attend(q, tuple(a[:, :, :12] for a in first), ring, TOKENS, TOKENS)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@pytest.mark.parametrize("sink", SINKS)
def test_it_lowers_for_cuda(sink, arithmetic):
    q, first, ring, _ = rows(sink)
    given = jax.eval_shape(lambda *given: given, q, first, ring, jnp.asarray(TOKENS), jnp.asarray(TOKENS))
    assert "attend_windows" in lower_for_cuda(lambda *given: attend_windows(*given, launch=Launch(arithmetic)), *given)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sink", SINKS)
def test_it_runs_on_a_gpu(sink, dtype, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    q, first, ring, everything = rows(sink, dtype)
    found = attend(q, first, ring, TOKENS, body_tokens(TOKENS, sink), launch=Launch(arithmetic))
    assert (wrong := wrong_in(found, expected(q, everything, sink))) is None, wrong
