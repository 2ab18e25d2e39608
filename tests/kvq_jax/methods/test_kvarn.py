"""KVarN against NumPy that follows its equations tile by tile, in the order of its public code."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.arrays.rotations import rotation
from tests.kvq_jax.methods.equations import assert_nearly_all_agree, rounded

BLOCK, HEAD_DIM, ROUNDS = 32, 16, 16
MAX_COARSENING = 2.0
SPEC = f"kvarn:group_size={BLOCK},scale_dtype=float32,block={2 * BLOCK}"


def rows(size: float) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values [1, 2, 64, 16] of uneven tokens and channels."""
    rng = np.random.default_rng(3)
    shape = 2, 1, 2, 2 * BLOCK
    x = rng.normal(size=(*shape, HEAD_DIM)) * np.exp(rng.normal(size=(*shape, 1)))
    k, v = size * (x + 2 * rng.normal(size=(HEAD_DIM,)))
    return k, v


def scales(tile: np.ndarray, minimum: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of columns and of rows of the round with the most even deviations, among
    those that do not make steps of rows, whose codes share one, much longer."""
    log_column, log_row = np.zeros((1, tile.shape[1])), np.zeros((tile.shape[0], 1))

    def balanced() -> np.ndarray:
        return tile / np.exp(log_column) / np.exp(log_row)

    def unevenness() -> float:
        deviations = (balanced().std(axis, ddof=1) for axis in (0, 1))
        return sum(d.max() / max(d.min(), 1e-8) for d in deviations)

    def squared_steps() -> float:
        return (np.exp(log_column) ** 2).sum() * (np.ptp(tile / np.exp(log_column), 1) ** 2).sum()

    maximum = MAX_COARSENING * squared_steps()
    best = unevenness(), log_column, log_row
    for _ in range(ROUNDS):
        step = np.log(balanced().std(0, ddof=1, keepdims=True).clip(1e-3, 1e3))
        log_column = (log_column + step).clip(minimum, 10)
        step = np.log(balanced().std(1, ddof=1, keepdims=True).clip(1e-3, 1e3))
        log_row = (log_row + step).clip(minimum, 10)
        if (now := unevenness()) < 0.999 * best[0] and squared_steps() <= maximum:
            best = now, log_column, log_row
    return np.exp(best[1]), np.exp(best[2])


def evened(tile: np.ndarray, bits: int, minimum: float) -> np.ndarray:
    """Return a tile as it is read back. Each row has one step and one zero point: the rows are
    channels of keys, tokens of values."""
    column, row = scales(tile, minimum)
    return rounded(tile / column / row, 1, bits) * row * column


def reference(x: np.ndarray, side: str, bits: int, minimum: float) -> np.ndarray:
    turned, read = x @ rotation(HEAD_DIM).T, np.empty_like(x)
    for head in range(x.shape[1]):
        for start in range(0, x.shape[2], BLOCK):
            at = 0, head, slice(start, start + BLOCK)
            tile = turned[at].T if side == "k" else turned[at]
            out = evened(tile, bits, minimum)
            read[at] = out.T if side == "k" else out
    return read @ rotation(HEAD_DIM)


@pytest.mark.parametrize(("bits", "floor"), [(4, 0.0), (2, 0.741)])
def test_the_body_is_what_the_equations_say(bits: int, floor: float):
    exact = rows(1.0)
    fp32 = (jnp.asarray(x, jnp.float32) for x in exact)
    read = kvq.roundtrip(f"{SPEC},bits={bits},floor={floor}", *fp32, layout="BNTH")
    minimum = np.log(floor) if floor else -10.0
    for side, x, one in zip("kv", exact, read, strict=True):
        wanted, scale = reference(x, side, bits, minimum), np.abs(x).max()
        # Rotation spreads an entry midway between two codes over its token.
        assert_nearly_all_agree(np.asarray(one), wanted, 1e-4 * scale)
        other = reference(x, side, bits, -10.0 if floor else np.log(0.741))
        assert np.abs(wanted - other).max() > 1e-2 * scale, "another floor would pass"


def test_the_size_of_rows_changes_nothing_without_a_floor():
    """With the public code's floor, no scale of small rows can fall, so they are read worse."""
    x = rows(1.0)[1]
    errors = {}
    for floor in (0.0, 0.741):
        for size in (1.0, 0.01):
            v = jnp.asarray(size * x, jnp.float32)
            spec = f"{SPEC},bits=4,floor={floor}"
            read = np.asarray(kvq.roundtrip(spec, v, v, layout="BNTH")[0])
            errors[floor, size] = np.linalg.norm(read - size * x) / np.linalg.norm(size * x)
    assert errors[0.0, 0.01] == pytest.approx(errors[0.0, 1.0], rel=0.02)
    assert errors[0.741, 0.01] > 1.2 * errors[0.0, 0.01]


def few_tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return values [1, 2, 128, 128] in which tokens repeat."""
    tokens = rng.normal(size=(8, 1, 2, 1, 128))
    order = rng.integers(0, 8, 128)
    named = {f"{n} tokens": np.concatenate(tokens[order % n], 2) for n in (1, 2, 3, 4, 8)}
    return named | {"127 copies": np.concatenate([*[tokens[0]] * 127, tokens[1]], 2)}


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_values_of_a_few_tokens_are_read_as_well_as_with_equal_scales(size: float):
    """Nearly all tokens agree in some channels, whose variance about their mean is close to 0."""
    for name, x in few_tokens(np.random.default_rng(5)).items():
        v = jnp.asarray(size * x, jnp.float32)
        one, plain = (
            np.asarray(kvq.roundtrip(spec, v, v, layout="BNTH")[1])
            for spec in ("kvarn", "kivi:group_size=128,rotate=true,block=128")
        )
        error, usual = (np.linalg.norm(read - size * x) for read in (one, plain))
        assert error < 1.5 * usual, f"{name}: {error / usual:.2f} times as large"


@pytest.mark.parametrize("size", [1e2, 5e3])
def test_channels_of_almost_no_variance_do_not_saturate(size: float):
    """Their scale is small, and what is stored of x / a must still fit float16."""
    rng = np.random.default_rng(7)
    same, noise = rng.normal(size=(1, 2, 1, 128)), rng.normal(size=(1, 2, 128, 128))
    x = size * (same + 1e-5 * noise)
    v = jnp.asarray(x, jnp.float32)
    read = np.asarray(kvq.roundtrip("kvarn:bits=8", v, v, layout="BNTH")[1])
    assert np.linalg.norm(read - x) < 0.02 * np.linalg.norm(x)
