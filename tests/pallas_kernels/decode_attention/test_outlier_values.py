"""The kernel of weighted outliers, interpreted, against float64 sums over their slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.merge import merged
from pallas_kernels.decode_attention.outlier_values import outlier_values, tuning_for
from pallas_kernels.decode_attention.partial_attention import NEG_INF, PartialAttention
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.shared import LN2
from tests.exhaustive import some
from tests.float64 import row_errors
from tests.pallas_kernels.codebook_sides import random_slots
from tests.pallas_kernels.harness import INTERPRETED, each_lowering, launches
from tests.pallas_kernels.lowering import lower_for_cuda

HEADS = 3
TOLERANCE = 1e-3  # weights are rounded to 11 bits
# Each program reads tiles of several heads and rows.
FEW = Tuning(tile=128, stages=1, cores=5, resident=1)


@dataclasses.dataclass(frozen=True)
class OutlierCase:
    """count: slots of a token, on average over its pool. scale: of scores, in powers of two."""

    id: str
    head_dim: int
    group: int
    pool: int
    count: int
    limits: tuple[int, ...]
    capacity: int
    scale: float = 2.0


# The last tile is cut short, and a head has up to 128 slots of a pool.
CASES = (
    OutlierCase("h128", 128, 4, 32, 4, (0, 1, 31, 32, 33, 129, 416), 416),
    OutlierCase("h64_one_query", 64, 1, 64, 3, (64, 0, 320), 320),
    OutlierCase("h256_wide_scores", 256, 8, 128, 5, (128, 130, 256), 256, scale=40.0),
    OutlierCase("h128_one_query", 128, 1, 32, 9, (128, 70), 128, scale=0.1),
    OutlierCase("h64", 64, 16, 32, 2, (224, 17), 224),
)
each = pytest.mark.parametrize("case", some(CASES, CASES[:2]), ids=lambda case: case.id)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Slots, the rows [B, K, S, H] that they stand for, and scores [B, K, R, S], the largest of
    which are far from 0.
    """

    index: np.ndarray
    residual: np.ndarray
    ends: np.ndarray
    rows: np.ndarray
    scores: np.ndarray


@functools.cache
def arrays_of(case: OutlierCase) -> Arrays:
    rng = np.random.default_rng(len(case.id))
    shape = len(case.limits), HEADS, case.capacity, case.head_dim
    index, residual, ends, rows = random_slots(rng, case.count, case.pool, shape)
    scores = (
        rng.normal(size=(*shape[:2], case.group, case.capacity)) * case.scale
        + rng.normal(size=(*shape[:2], case.group, 1)) * 300
    )
    return Arrays(index, residual, ends, rows, scores.astype(np.float32))


@functools.partial(jax.jit, static_argnames=("case", "tuning", "launch", "first"))
def pieces_of(
    case: OutlierCase, *arrays, tuning: Tuning | None, launch: Launch, first: int = 0
) -> Pieces:
    """`arrays`: as `arguments` returns them."""
    return outlier_values(*arrays, case.head_dim, first=first, tuning=tuning, launch=launch)


def arguments(case: OutlierCase, a: Arrays, first: int = 0) -> tuple[jax.Array | np.ndarray, ...]:
    """Return the scores from query head `first` on, the slots, and the rows' limits."""
    scores = jnp.asarray(a.scores[:, first:])
    return scores, a.index, a.residual.view(np.uint16), a.ends, jnp.asarray(case.limits)


def sums(
    case: OutlierCase,
    a: Arrays,
    tuning: Tuning | None = FEW,
    launch: Launch = INTERPRETED,
    first: int = 0,
) -> PartialAttention:
    """Return the merged pieces."""
    arrays = arguments(case, a, first)
    pieces = pieces_of(case, *arrays, tuning=tuning, launch=launch, first=first)
    return merged([pieces], case.group, launch=launch)


def largest(scores: np.ndarray) -> np.ndarray:
    return scores.astype(np.float64).max(axis=-1, keepdims=True)


def weighted(
    case: OutlierCase, rows: np.ndarray, scores: np.ndarray, limits: tuple[int, ...]
) -> np.ndarray:
    """Return sum of 2^(score - largest score of a row) * row over the tokens that count, in
    float64."""
    counts = np.arange(case.capacity) < np.asarray(limits)[:, None]
    weights = np.where(
        counts[:, None, None], np.exp2(scores.astype(np.float64) - largest(scores)), 0
    )
    return np.einsum("bkgs,bksh->bkgh", weights, rows)


@launches(CASES, CASES[:2])
def test_sums_are_those_over_the_slots_of_the_tokens_that_count(case, launch):
    """In a few programs, and in as many as on a GPU."""
    for tuning in (FEW, None) if launch.interpret else (None,):
        check(case, tuning, launch)


def check(case: OutlierCase, tuning: Tuning | None, launch: Launch) -> None:
    a, limits = arrays_of(case), case.limits
    assert np.diff(a.ends.astype(int), axis=2, prepend=0).max() > case.pool, (
        "no head has more slots of a pool than a step takes"
    )
    part = sums(case, a, tuning, launch)
    actual = np.asarray(part.o, np.float64) * np.exp(
        np.asarray(part.m, np.float64) - largest(a.scores) * LN2
    )
    wanted = weighted(case, a.rows, a.scores, limits)
    assert (np.asarray(part.l) == 0).all(), "weights are counted twice"
    errors = np.where(
        (wanted == 0).all(axis=-1), np.abs(actual).max(axis=-1), row_errors(actual, wanted)
    ).max(axis=(1, 2))
    assert errors.max() < TOLERANCE, f"errors by row {dict(zip(limits, errors, strict=True))}"
    heaviest = (
        np.abs(a.rows) * np.exp2(a.scores.max(axis=2) - largest(a.scores).max(axis=2))[..., None]
    )
    heaviest[np.arange(case.capacity) >= np.asarray(limits)[:, None, None].repeat(HEADS, 1)] = 0
    without = np.where(heaviest == heaviest.max(axis=(2, 3), keepdims=True), 0, a.rows)
    wrong = {
        "zeros": np.zeros(actual.shape),
        "slots of the next head": weighted(case, np.roll(a.rows, 1, axis=1), a.scores, limits),
        "weights of the next token": weighted(case, np.roll(a.rows, 1, axis=2), a.scores, limits),
        "the next channel": np.roll(wanted, 1, axis=3),
        "one residual left out": weighted(case, without, a.scores, limits),
        "tokens past the limit": weighted(case, a.rows, a.scores, (case.capacity,) * len(limits)),
    }
    if case.group > 1:
        wrong["weights of the next query head"] = weighted(
            case, a.rows, np.roll(a.scores, 1, axis=2), limits
        )
    for name, rows in wrong.items():
        assert row_errors(actual, rows).max() > 5 * TOLERANCE, f"{name} would pass"


@each
def test_what_no_token_that_counts_has_is_never_read(case):
    """Spoil scores of other tokens, slots behind the last head's, and everything in pools without a
    token that counts.
    """
    a = arrays_of(case)
    clean, dirty = (
        sums(case, a),
        {f.name: np.array(getattr(a, f.name)) for f in dataclasses.fields(a)},
    )
    pools = np.arange(case.capacity // case.pool)
    for b, limit in enumerate(case.limits):
        dirty["scores"][b, :, :, limit:] = np.nan
        unused = np.arange(a.index.shape[2]) >= a.ends[b, :, -1:]
        dead = pools * case.pool >= limit
        unused |= dead[:, None]
        dirty["index"][b][unused] = 0xFFFF
        dirty["residual"][b][unused] = np.nan
        dirty["ends"][b][dead] = np.arange(HEADS) * 0x5555
    assert all(
        (dirty[name] != getattr(a, name)).any() for name in ("scores", "index", "residual", "ends")
    ), "nothing was spoiled"
    for name, one, other in zip(
        PartialAttention._fields, clean, sums(case, Arrays(**dirty)), strict=True
    ):
        np.testing.assert_array_equal(other, one, err_msg=f"{name}: garbage leaks")


def test_parts_without_a_slot_change_nothing_that_they_merge_with():
    case = CASES[0]
    a = arrays_of(case)
    empty = dataclasses.replace(
        a, ends=np.zeros_like(a.ends), residual=np.full_like(a.residual, np.inf)
    )
    nothing, some_slots = (
        pieces_of(case, *arguments(case, x), tuning=FEW, launch=INTERPRETED) for x in (empty, a)
    )
    alone, both = (
        merged(parts, case.group, launch=INTERPRETED)
        for parts in ([some_slots], [nothing, some_slots])
    )
    assert (np.asarray(alone.m[0]) <= NEG_INF * 0.5).all(), "a row without tokens"
    for name, one, other in zip(PartialAttention._fields, alone, both, strict=True):
        np.testing.assert_array_equal(other, one, err_msg=name)


def test_later_heads_find_their_slots_by_themselves():
    case = CASES[0]
    a = arrays_of(case)
    whole, later = sums(case, a), sums(case, a, first=1)
    errors = row_errors(later.o * np.exp(later.m - whole.m[:, 1:]), whole.o[:, 1:])[
        np.asarray(case.limits) > 128
    ]
    assert errors.max() < TOLERANCE
    assert (
        row_errors(later.o, whole.o[:, :2])[np.asarray(case.limits) > 128].max() > 5 * TOLERANCE
    ), "slots of the first heads would pass"


def test_tiles_are_whole_pools():
    case = next(case for case in CASES if case.pool == 128)
    with pytest.raises(ValueError, match="64 is not whole pools of 128 tokens"):
        sums(case, arrays_of(case), Tuning(tile=64))


@each_lowering(CASES, CASES[:2])
def test_the_kernel_lowers_for_cuda(case, arithmetic):
    a = arrays_of(case)
    text = lower_for_cuda(
        lambda *arrays: pieces_of(
            case, *arrays, tuning=tuning_for(case.group), launch=Launch(arithmetic)
        ),
        *arguments(case, a),
    )
    assert "outlier_values" in text
