"""The kernel that merges splits, interpreted, against the softmax over all tokens at once; and its lowering for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.merge import finished, merged
from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.launch import Launch
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda

BATCH, HEADS, CHANNELS, CAPACITY = 3, 2, 64, 100
POSITIONS = np.array([0, CAPACITY - 1, CAPACITY], np.int32)
INTERPRETED = Launch(interpret=True)


@functools.partial(jax.jit, static_argnames=("group", "dtype", "launch"))
def merge(parts, positions, group, dtype, launch):
    out = finished(parts, group, positions, capacity=CAPACITY, dtype=dtype, launch=launch)
    return merged(parts, group, launch=launch), out


def random_parts(splits: tuple[int, ...], group: int) -> tuple[list[Splits], np.ndarray, np.ndarray]:
    """Return splits of five tokens each, every third empty, and the scores and values of all tokens; -inf where they do not count."""
    rng, padded = np.random.default_rng(0), 1 << (group - 1).bit_length()
    parts, scores, values = [], [], []
    for count in splits:
        score = rng.normal(size=(BATCH, HEADS, count, 5, padded)) * 4
        value = rng.normal(size=(BATCH, HEADS, count, 5, CHANNELS))
        m = score.max(axis=3)
        score[:, :, 2::3], m[:, :, 2::3] = -np.inf, -1e30
        weights = np.exp2(score - m[:, :, :, None])
        arrays = m, weights.sum(axis=3), np.einsum("bkptr,bkpth->bkphr", weights, value)
        parts.append(Splits(*(jnp.asarray(a, jnp.float32) for a in arrays)))
        scores.append(score.reshape(BATCH, HEADS, -1, padded)[..., :group])
        values.append(value.reshape(BATCH, HEADS, -1, CHANNELS))
    return parts, np.concatenate(scores, axis=2), np.concatenate(values, axis=2)


@pytest.mark.parametrize("splits", [(1, 8), (1, 131), (3,)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_merged_splits_are_the_softmax_of_all_tokens(splits, group):
    check(splits, group, INTERPRETED)


def check(splits: tuple[int, ...], group: int, launch: Launch) -> None:
    parts, scores, values = random_parts(splits, group)
    part, out = merge(parts, POSITIONS, group, jnp.float32, launch)
    weights = np.exp2(scores)
    wanted = np.einsum("bktg,bkth->bkgh", weights / weights.sum(axis=2, keepdims=True), values)
    assert row_errors(part.o / part.l, wanted).max() < 1e-5
    np.testing.assert_allclose(np.exp(part.m[..., 0]) * part.l[..., 0], weights.sum(axis=2), rtol=1e-5)
    assert row_errors(out[:2], wanted[:2]).max() < 1e-5
    assert np.isnan(out[2]).all(), "a row past its capacity has a number"
    fewer = [Splits(*(a[:, :, 1:] for a in parts[-1]))]
    other = merge([*parts[:-1], *fewer], POSITIONS, group, jnp.float32, launch)[1]
    assert row_errors(other[:2], wanted[:2]).max() > 1e-2, "a split fewer would pass"


def test_no_token_is_zero():
    parts, _, _ = random_parts((3,), 2)
    empty = [Splits(*(a[:, :, 2:] for a in parts[0]))]
    part, out = merge(empty, POSITIONS, 2, jnp.bfloat16, INTERPRETED)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out[:2], np.float32).any()
    assert not np.asarray(part.l).any()


@pytest.mark.parametrize("splits", [(1, 8), (1, 131)], ids=str)
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_it_lowers_for_cuda(splits, arithmetic):
    given = jax.eval_shape(lambda parts: parts, random_parts(splits, 4)[0])
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    text = lower_for_cuda(lambda parts, row: merge(parts, row, 4, jnp.bfloat16, Launch(arithmetic)), given, row)
    assert "finish_attention" in text
    assert "merge_splits" in text


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [(1, 8), (1, 131), (3,)], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_it_runs_on_a_gpu(splits, group, arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check(splits, group, Launch(arithmetic))
