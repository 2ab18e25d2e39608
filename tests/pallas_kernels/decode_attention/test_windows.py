"""The kernel that attends to the full-precision windows, interpreted, against float64. Slots
without a token hold NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.merge import merged
from pallas_kernels.decode_attention.partial_attention import PartialAttention
from pallas_kernels.decode_attention.windows import WindowQueries
from pallas_kernels.launch import LAUNCH, Launch
from pallas_kernels.quantize.append import Places, Side, append_token
from tests.float64 import rotated, row_errors, softmax
from tests.pallas_kernels.harness import INTERPRETED, launch_name, launches
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS, GROUP, CHANNELS = 2, 3, 64
TOKENS = np.array([0, 1, 17, 90, 101, 132, 400], np.int32)
FREQUENCIES = (1e4 ** (-np.arange(CHANNELS // 2) / (CHANNELS // 2))).astype(np.float32)
FACTOR = np.float32(1.25)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens of the windows. Whole tiles do not fill a ring of 100 slots."""

    sink: int
    recent: int = 68
    block: int = 32

    @property
    def id(self) -> str:
        return f"{self.sink}-{self.recent}-{self.block}"

    @property
    def ring(self) -> int:
        return self.recent + self.block

    def body(self, tokens: np.ndarray) -> np.ndarray:
        return np.maximum(tokens - self.sink - self.recent, 0) // self.block * self.block


# The last two have fewer slots than a tile.
SIZES = (Sizes(0), Sizes(20), Sizes(32), Sizes(1, recent=0), Sizes(5, recent=4, block=8))
USUAL = SIZES[0], SIZES[1], SIZES[4]
before_or_after_rope = pytest.mark.parametrize(
    "rotation", [None, (FREQUENCIES, FACTOR)], ids=["after_rope", "before_rope"]
)


@functools.partial(jax.jit, static_argnames="launch")
def attend(q, sink, ring, tokens, limits, rotation=None, launch=LAUNCH):
    """Attend to windows without a new token."""
    batch, heads, _, channels = q.shape
    row, nothing = (
        jnp.zeros((batch, heads, 1, channels), ring[0].dtype),
        jnp.zeros((batch,), jnp.int32),
    )
    sides = [Side(row, *windows, None) for windows in zip(sink, ring, strict=True)]
    places = Places(nothing, nothing > 0, nothing, nothing, nothing > 0)
    queries = WindowQueries(q, tokens, limits, rotation)
    _, part = append_token(sides, places, block=1, queries=queries, launch=launch)
    return merged([part], GROUP, launch=launch)


def rows(sizes: Sizes, dtype: str = "bfloat16") -> tuple[jax.Array, tuple, tuple, np.ndarray]:
    """Return queries [B, K, G, H], the windows with NaN in slots that hold no token, and all keys
    and values [2, B, K, S, H].
    """
    rng = np.random.default_rng(3)
    everything = rng.normal(size=(2, len(TOKENS), HEADS, int(TOKENS.max()), CHANNELS)).astype(
        np.float32
    )
    first = np.full((2, len(TOKENS), HEADS, sizes.sink, CHANNELS), np.nan, np.float32)
    ring = np.full((2, len(TOKENS), HEADS, sizes.ring, CHANNELS), np.nan, np.float32)
    for b, n in enumerate(TOKENS):
        first[:, b, :, : min(n, sizes.sink)] = everything[:, b, :, : min(n, sizes.sink)]
        for p in range(max(sizes.sink, n - sizes.ring), n):
            ring[:, b, :, (p - sizes.sink) % sizes.ring] = everything[:, b, :, p]
    q = jnp.asarray(rng.normal(size=(len(TOKENS), HEADS, GROUP, CHANNELS)) * 2, jnp.float32)
    stored = [tuple(jnp.asarray(side, dtype) for side in window) for window in (first, ring)]
    return (
        q,
        stored[0],
        stored[1],
        np.asarray(jnp.asarray(everything, dtype).astype(jnp.float32), np.float64),
    )


def turned(keys: np.ndarray, positions: np.ndarray, rotation: tuple, dtype: str) -> np.ndarray:
    """Return keys [..., S, H] after RoPE at positions [S], rounded to the windows' dtype before the
    factor is applied.
    """
    frequencies, factor = rotation
    rounded = rotated(keys, positions[:, None] * frequencies.astype(np.float64))
    return factor * rounded.astype(jnp.dtype(dtype)).astype(np.float64)


def expected(
    q: jax.Array,
    everything: np.ndarray,
    sizes: Sizes,
    rotation: tuple | None = None,
    shift: int = 0,
    dtype: str = "bfloat16",
) -> PartialAttention:
    """Return m, l, o over the tokens that are not in the body, in float64. Keys before RoPE are
    rotated to their positions plus `shift`.
    """
    at, body = np.arange(everything.shape[3]), sizes.body(TOKENS)
    keys = everything[0] if rotation is None else turned(everything[0], at + shift, rotation, dtype)
    scores = np.einsum("bkgh,bksh->bkgs", np.asarray(q.astype(dtype), np.float64), keys) / np.sqrt(
        CHANNELS
    )
    exact = (at < TOKENS[:, None]) & ((at < sizes.sink) | (at >= sizes.sink + body[:, None]))
    scores = np.where(exact[:, None, None], scores, -np.inf)
    m = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - m)
    return PartialAttention(
        m, weights.sum(-1, keepdims=True), np.einsum("bkgs,bksh->bkgh", weights, everything[1])
    )


def wrong_in(actual: PartialAttention, wanted: PartialAttention) -> str | None:
    """Compare the rows that have tokens, which are all but the first."""
    a, b = (
        np.asarray(part.m[1:]) + np.log(np.maximum(part.l[1:], 1e-30)) for part in (actual, wanted)
    )
    if not np.allclose(a, b, rtol=1e-2, atol=1e-2):
        return f"the logarithm of the sum of all weights is off by {np.abs(a - b).max():.1e}"
    out, other = (
        np.asarray(part.o) / np.maximum(np.asarray(part.l), 1e-30) for part in (actual, wanted)
    )
    errors = row_errors(out[1:], other[1:])
    return (
        f"o is off by {errors.max():.1e}, by row {errors.max(axis=(1, 2))}"
        if errors.max() > 1e-2
        else None
    )


@before_or_after_rope
@launches(SIZES, USUAL, SIZES[1:2])
def test_attention_is_that_of_the_tokens_outside_the_body(case, launch, rotation):
    for dtype in ("bfloat16",) if launch.interpret else ("bfloat16", "float16"):
        check(case, rotation, launch, dtype)


def check(sizes: Sizes, rotation: tuple | None, launch: Launch, dtype: str) -> None:
    q, first, ring, everything = rows(sizes, dtype)
    limits = sizes.body(TOKENS)
    actual, wanted = (
        attend(q, first, ring, TOKENS, limits, rotation, launch),
        expected(q, everything, sizes, rotation, dtype=dtype),
    )
    assert (wrong := wrong_in(actual, wanted)) is None, wrong
    assert not np.asarray(actual.l[0]).any(), "a row without tokens has seen some"
    assert limits.max() > 0, "no row has a body: nothing would show what is read from it"
    late = attend(q, first, ring, TOKENS, limits + sizes.block, rotation, launch)
    assert wrong_in(late, wanted), "a window that begins one block later would pass"
    early = attend(q, first, ring, np.maximum(TOKENS - 1, 0), limits, rotation, launch)
    assert wrong_in(early, wanted), "a window without the newest token would pass"
    if rotation is None:
        return
    for shift in (-1, 1):
        assert wrong_in(actual, expected(q, everything, sizes, rotation, shift, dtype)), (
            f"keys rotated to position {shift:+} would pass"
        )
    for name, other in (("not rotated", None), ("without the factor", (FREQUENCIES, 1.0))):
        assert wrong_in(actual, expected(q, everything, sizes, other, dtype=dtype)), (
            f"keys that are {name} would pass"
        )


@pytest.mark.parametrize("launch", [INTERPRETED], ids=launch_name)
def test_keys_far_along_a_context_are_rotated_by_their_exact_angle(launch):
    """Test ten million tokens, of which the ring holds the last: slot s holds a position that is s
    modulo the number of slots.
    """
    sizes, tokens = Sizes(0), 10_000_000
    q, _, ring, _ = rows(sizes)
    q, ring = q[-1:], tuple(side[-1:] for side in ring)
    newest = tokens - 1
    positions = newest - (newest - np.arange(sizes.ring)) % sizes.ring
    count, limit = (jnp.full((1,), n, jnp.int32) for n in (tokens, tokens - sizes.ring))
    actual = attend(
        q, tuple(side[:, :, :0] for side in ring), ring, count, limit, (FREQUENCIES, FACTOR), launch
    )

    def in_float64(positions: np.ndarray) -> np.ndarray:
        keys, values = (np.asarray(side.astype(jnp.float32), np.float64) for side in ring)
        keys = turned(keys, positions, (FREQUENCIES, FACTOR), "bfloat16")
        queries = np.asarray(q.astype(jnp.bfloat16), np.float64)
        return softmax(queries @ np.swapaxes(keys, 2, 3) / np.sqrt(CHANNELS)) @ values

    error = row_errors(np.asarray(actual.o / actual.l), in_float64(positions)).max()
    assert error < 1e-2, f"off by {error:.1e}"
    assert row_errors(np.asarray(actual.o / actual.l), in_float64(positions + 1)).max() > 0.1, (
        "the next token's angles would pass"
    )


def test_windows_that_kernels_cannot_read_are_refused():
    q, first, ring, _ = rows(SIZES[1])
    with pytest.raises(ValueError, match="windows in float32"):
        attend(
            q,
            *(tuple(a.astype(jnp.float32) for a in window) for window in (first, ring)),
            TOKENS,
            TOKENS,
        )
    with pytest.raises(ValueError, match="a ring of 0 slots"):
        attend(q, first, tuple(a[:, :, :0] for a in ring), TOKENS, TOKENS)


@pytest.mark.parametrize(("sizes", "arithmetic"), [(SIZES[1], "asm"), (SIZES[3], "jnp")], ids=str)
@before_or_after_rope
def test_it_lowers_for_cuda(sizes, rotation, arithmetic):
    q, first, ring, _ = rows(sizes)
    attention = functools.partial(attend, launch=Launch(arithmetic))
    inputs = q, first, ring, TOKENS, TOKENS, rotation
    assert "append_token" in lower_for_cuda(attention, *inputs)
