"""The kernel that merges splits, interpreted, against the softmax over all tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.merge import merged, merged_output
from pallas_kernels.decode_attention.partial_attention import Splits
from pallas_kernels.decode_attention.schedule import Pieces, Schedule
from pallas_kernels.launch import Launch
from tests.exhaustive import some
from tests.float64 import row_errors
from tests.pallas_kernels.harness import INTERPRETED, launches
from tests.pallas_kernels.lowering import lower_for_cuda, needs_mosaic

MOSAIC = Launch(interpret=True, route="mosaic")
BATCH, HEADS, CHANNELS, CAPACITY = 3, 2, 64, 100
POSITIONS = np.array([0, CAPACITY - 1, CAPACITY], np.int32)
# (splits of each part, query heads for each KV head)
SPLITS = ((1, 8), 3), ((1, 131), 1), ((1, 8), 1), ((1, 131), 3), ((1, 131), 4), ((3,), 4)
# (tokens of each row, programs)
PIECES = tuple((rows, n) for rows in ((64, 0, 33), (1, 640, 64)) for n in (1, 90))


@functools.partial(jax.jit, static_argnames=("group", "dtype", "launch"))
def merge(parts, positions, group, dtype, launch):
    out = merged_output(parts, group, positions, capacity=CAPACITY, dtype=dtype, launch=launch)
    return merged(parts, group, launch=launch), out


def random_parts(
    splits: tuple[int, ...], group: int
) -> tuple[list[Splits], np.ndarray, np.ndarray]:
    """Return splits of five tokens each, every third empty, and the scores and values of all
    tokens. Scores of tokens that do not count are -inf.
    """
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


@launches(SPLITS, SPLITS[:2])
def test_merged_splits_are_the_softmax_of_all_tokens(case, launch):
    splits, group = case
    parts, scores, values = random_parts(splits, group)
    part, out = merge(parts, POSITIONS, group, jnp.float32, launch)
    weights = np.exp2(scores)
    wanted = np.einsum("bktg,bkth->bkgh", weights / weights.sum(axis=2, keepdims=True), values)
    assert row_errors(part.o / part.l, wanted).max() < 1e-5
    np.testing.assert_allclose(
        np.exp(part.m[..., 0]) * part.l[..., 0], weights.sum(axis=2), rtol=1e-5
    )
    assert row_errors(out[:2], wanted[:2]).max() < 1e-5
    assert np.isnan(out[2]).all(), "a row past its capacity has a number"
    fewer = [Splits(*(a[:, :, 1:] for a in parts[-1]))]
    other = merge([*parts[:-1], *fewer], POSITIONS, group, jnp.float32, launch)[1]
    assert row_errors(other[:2], wanted[:2]).max() > 1e-2, "a split fewer would pass"


@pytest.mark.parametrize(
    "launch", [INTERPRETED, pytest.param(MOSAIC, marks=needs_mosaic)], ids=["triton", "mosaic"]
)
def test_no_token_is_zero(launch):
    parts, _, _ = random_parts((3,), 2)
    empty = [Splits(*(a[:, :, 2:] for a in parts[0]))]
    part, out = merge(empty, POSITIONS, 2, jnp.bfloat16, launch)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out[:2], np.float32).any()
    assert not np.asarray(part.l).any()


def pieces_of(
    limits: np.ndarray, schedule: Schedule, score: np.ndarray, value: np.ndarray
) -> Pieces:
    """Return the pieces that programs leave for scores [B, K, S, R] and values [B, K, S, H], with
    NaN in places without a unit.
    """
    padded, per = (
        score.shape[3],
        schedule.per_program(jnp.int32(schedule.heads * np.sum(-(-limits // schedule.tile)))),
    )
    arrays = [
        np.full((schedule.pieces, *rest), np.nan, np.float32)
        for rest in ((padded,), (padded,), (CHANNELS, padded))
    ]
    number = 0
    for b, limit in enumerate(limits):
        for k in range(HEADS):
            parts: dict[int, list[int]] = {}
            for tile in range(-(-int(limit) // schedule.tile)):
                at = tile * schedule.tile
                parts.setdefault(number // int(per) + b * HEADS + k, []).extend(
                    range(at, min(at + schedule.tile, int(limit)))
                )
                number += 1
            for place, tokens in parts.items():
                m = score[b, k, tokens].max(axis=0)
                weights = np.exp2(score[b, k, tokens] - m)
                for array, part in zip(
                    arrays, (m, weights.sum(axis=0), value[b, k, tokens].T @ weights), strict=True
                ):
                    array[place] = part
    m, l, o = map(jnp.asarray, arrays)
    return Pieces(m, l, o, jnp.asarray(limits, jnp.int32), schedule)


def random_pieces(
    limits: np.ndarray, group: int, programs: int
) -> tuple[Pieces, np.ndarray, np.ndarray]:
    """Return pieces, and the scores (-inf beyond a row's limit) and values of all tokens."""
    rng, padded = np.random.default_rng(1), 1 << (group - 1).bit_length()
    shape = BATCH, HEADS, int(limits.max())
    score, value = rng.normal(size=(*shape, padded)) * 4, rng.normal(size=(*shape, CHANNELS))
    pieces = pieces_of(limits, Schedule(programs, 4, BATCH, HEADS), score, value)
    live = np.arange(shape[2])[:, None] < limits[:, None, None, None]
    return pieces, np.where(live, score, -np.inf)[..., :group], value


def check_pieces(limits: np.ndarray, group: int, programs: int, launch: Launch) -> None:
    """Pieces and windows together are the softmax of all tokens."""
    [window], *of_window = random_parts((1,), group)
    pieces, *of_body = random_pieces(limits, group, programs)
    assert np.isnan(np.asarray(pieces.l)).any(), "no place is free: nothing is shown of those"
    scores, values = (np.concatenate(two, axis=2) for two in zip(of_window, of_body, strict=True))
    part, out = merge([window, pieces], POSITIONS, group, jnp.float32, launch)

    def attention(scores: np.ndarray) -> np.ndarray:
        weights = np.exp2(scores)
        mean = weights / weights.sum(axis=2, keepdims=True)
        return np.einsum("bktg,bkth->bkgh", mean, values)

    wanted = attention(scores)
    assert row_errors(part.o / part.l, wanted).max() < 1e-5
    mass = np.exp(np.asarray(part.m[..., 0], float)) * part.l[..., 0]
    np.testing.assert_allclose(mass, np.exp2(scores).sum(axis=2), rtol=1e-4)
    assert row_errors(out[:2], wanted[:2]).max() < 1e-5
    assert np.isnan(out[2]).all(), "a row past its capacity has a number"
    scores[:, :, np.argmax(scores[0, 0, :, 0])] = -np.inf
    assert row_errors(out[:1], attention(scores)[:1]).max() > 1e-3, "a token fewer would pass"


@pytest.mark.parametrize(("limits", "programs"), some(PIECES, (PIECES[0], PIECES[3])), ids=str)
def test_pieces_of_rows_of_any_length_are_merged_with_the_windows(limits, programs):
    """One row has more pieces than a step of the loop takes, and another none."""
    check_pieces(np.array(limits), 2, programs, INTERPRETED)


@pytest.mark.parametrize("splits", [(1, 8), (1, 131)], ids=str)
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_it_lowers_for_cuda(splits, arithmetic):
    text = lower_for_cuda(
        lambda parts, row: merge(parts, row, 4, jnp.bfloat16, Launch(arithmetic)),
        *(random_parts(splits, 4)[0], POSITIONS),
    )
    assert "finish_attention" in text
    assert "merge_splits" in text
