"""Attention over codes with tables, outliers and keys before RoPE, interpreted, against float64
attention over the rows that they stand for; their lowering for CUDA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.codecs.kernel_readers import nonuniform
from pallas_kernels.decode_attention import kernel, matvec
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.launch import Launch
from pallas_kernels.readers.sparse_outliers import outlier_scores
from pallas_kernels.tiles.layout import plane_layout
from tests.exhaustive import some
from tests.pallas_kernels.decode_attention.test_decode import output, reference
from tests.pallas_kernels.kernel_cases import Lengths, row_errors
from tests.pallas_kernels.lowering import lower_for_cuda
from tests.pallas_kernels.nonuniform_cases import Format, Stored, spoiled, stored, structs

HEADS = 2
SHORT = Lengths(160, (0, 1, 63, 64, 65, 129, 160))  # the capacity is no multiple of the tile
LONG = Lengths(608, (0, 1, 63, 64, 129, 577, 608))  # several splits, as they are chosen on a GPU
TUNING = Tuning(tile=64, cores=2 * HEADS * len(SHORT.limits), resident=1)
TOLERANCE = 5e-3
INTERPRETED = Launch(interpret=True)
GARBAGE = (
    0x7FFF,
    0x7C00,
    0x7BFF,
)  # in fp16 NaN, infinity, and the largest number, of which two are infinite


@dataclasses.dataclass(frozen=True)
class Case:
    id: str
    head_dim: int
    group: int
    k: Format
    v: Format

    @functools.cached_property
    def q(self) -> jax.Array:
        shape = (len(SHORT.limits), HEADS, self.group, self.head_dim)
        return jnp.asarray(np.random.default_rng(9).standard_normal(shape) * 0.5, jnp.float32)


@functools.cache
def sides_of(case: Case, lengths: Lengths) -> tuple[Stored, Stored]:
    rows = len(lengths.limits)
    k, v = (
        stored(f, case.head_dim, rows, HEADS, lengths.capacity, i)
        for i, f in enumerate((case.k, case.v))
    )
    return k, v


CASES = (
    Case(
        "nuq3_1percent_before_rope",
        128,
        1,
        Format(3, "channels", 4, pre_rope=True),
        Format(3, "token", 4),
    ),
    Case("nuq4_after_rope", 64, 7, Format(4, "channels", 2), Format(4, 32)),
    Case("nuq2_groups_before_rope", 128, 8, Format(2, 64, pre_rope=True), Format(2, "channels", 3)),
    Case("nuq4_h256", 256, 4, Format(4, "channels", pre_rope=True), Format(3, "token", 6)),
    Case("nuq2_h64_slots", 64, 4, Format(2, "channels", 9, pre_rope=True), Format(2, "token", 9)),
)
each = pytest.mark.parametrize("case", some(CASES, CASES[:2]), ids=lambda case: case.id)


@functools.partial(jax.jit, static_argnames=("case", "lengths", "tuning", "launch"))
def attend(case: Case, q, k, v, limits, lengths, tuning, launch):
    sides = sides_of(case, lengths)
    keys, values = (sides[0].reader, k), (sides[1].reader, v)
    return decode_attention(
        q, keys, values, limits, capacity=lengths.capacity, tuning=tuning, launch=launch
    )


def outputs(
    case: Case, arrays, lengths: Lengths, tuning: Tuning | None, launch: Launch
) -> np.ndarray:
    return output(
        attend(case, case.q, *arrays, jnp.asarray(lengths.limits), lengths, tuning, launch)
    )


def check_attention(case: Case, lengths: Lengths, tuning: Tuning | None, launch: Launch) -> None:
    (k, v), limits = sides_of(case, lengths), lengths.limits
    found = outputs(case, (k.arrays, v.arrays), lengths, tuning, launch)
    wanted = reference(case.q, k.rows(), v.rows(), limits)
    errors = row_errors(found, wanted).max(axis=(1, 2))
    assert (found[0] == 0).all(), "a row without tokens has no output"
    assert errors[1:].max() < TOLERANCE, f"errors by row {dict(zip(limits, errors, strict=True))}"
    wrong = {
        "zeros": np.zeros(found.shape),
        "values in the place of keys": reference(case.q, v.rows(), v.rows(), limits),
        "one token fewer": reference(
            case.q, k.rows(), v.rows(), tuple(max(n - 1, 0) for n in limits)
        ),
        "one token more": reference(
            case.q, k.rows(), v.rows(), tuple(min(n + 1, lengths.capacity - 1) for n in limits)
        ),
        "keys of the next head": reference(case.q, np.roll(k.rows(), 1, axis=1), v.rows(), limits),
    }
    if case.k.slots:
        wrong["keys without outliers"] = reference(case.q, k.rows(outliers=False), v.rows(), limits)
    if case.v.slots:
        wrong["values without outliers"] = reference(
            case.q, k.rows(), v.rows(outliers=False), limits
        )
    if case.k.pre_rope:
        wrong["keys without a rotation"] = reference(
            case.q, k.rows(rotated=False), v.rows(), limits
        )
        wrong["keys one position further"] = reference(case.q, k.rows(moved=1), v.rows(), limits)
    for name, rows in wrong.items():
        assert row_errors(found, rows)[1:].max() > 5 * TOLERANCE, f"{name} would pass"


def check_garbage(case: Case, lengths: Lengths, tuning: Tuning | None, launch: Launch) -> None:
    """Check that what lies at a row's limit and behind it changes no bit, whatever it is, except by
    rounding where outliers of values are added up, which a GPU does in any order."""
    tolerance = 1e-5 if case.v.slots and not launch.interpret else 0.0
    sides, less = sides_of(case, lengths), tuple(max(n - 32, 0) for n in lengths.limits)
    arrays = [side.arrays for side in sides]
    clean = outputs(case, arrays, lengths, tuning, launch)
    for bits in GARBAGE:
        dirty, further = (
            [spoiled(side, limits, bits) for side in sides] for limits in (lengths.limits, less)
        )
        for before, after in zip(jax.tree.leaves(arrays), jax.tree.leaves(dirty), strict=True):
            assert before.ndim <= 2 or (before != after).any(), "an array of tokens was not spoiled"
        assert (
            row_errors(outputs(case, dirty, lengths, tuning, launch), clean).max() <= tolerance
        ), f"{bits:#x} leaks"
        assert (
            row_errors(outputs(case, further, lengths, tuning, launch), clean).max()
            > 100 * tolerance
        ), f"{bits:#x}: nothing was spoiled"


@each
def test_every_length_equals_the_reference_on_the_same_codes(case):
    check_attention(case, SHORT, TUNING, INTERPRETED)


@each
def test_garbage_in_unused_capacity_does_not_leak(case):
    check_garbage(case, SHORT, TUNING, INTERPRETED)


def test_heads_come_one_after_the_other_where_scores_of_all_need_too_much_memory(monkeypatch):
    """All but the first have a barrier that waits for the head before.

    Scores are the same, bit for bit. Exponentials of arrays of another shape may differ in their
    last bit, and a weight then rounds to the next fp16 number: 2^-11 of its share of a row.
    """
    case = CASES[0]
    arrays = [side.arrays for side in sides_of(case, SHORT)]
    at_once = outputs(case, arrays, SHORT, TUNING, INTERPRETED)
    monkeypatch.setattr(kernel, "STORED_SCORES", 1)
    attend.clear_cache()
    text = (
        jax.jit(lambda *args: attend(case, *args, SHORT, TUNING, INTERPRETED))
        .lower(case.q, *arrays, jnp.asarray(SHORT.limits))
        .as_text()
    )
    assert text.count("stablehlo.optimization_barrier") == HEADS - 1
    apart = outputs(case, arrays, SHORT, TUNING, INTERPRETED)
    attend.clear_cache()
    errors = row_errors(apart, at_once)
    assert np.median(errors) < 1e-6, "few weights lie on the border of two fp16 numbers"
    assert errors.max() < 2**-11
    assert row_errors(apart[:, ::-1], at_once).max() > 5 * TOLERANCE, "the heads could be exchanged"


def check_products(case: Case, launch: Launch) -> None:
    """q K^T and p V by themselves, over all tokens."""
    capacity, tuning = 128, Tuning(tile=64, cores=2 * HEADS, resident=1)
    sides = [
        stored(f, case.head_dim, 1, HEADS, capacity, i) for i, f in enumerate((case.k, case.v))
    ]
    q, p = (
        case.q[:1],
        jnp.asarray(np.random.default_rng(3).random((1, HEADS, case.group, capacity)), jnp.float32),
    )
    found = jax.jit(
        lambda q, a: matvec.scores(
            q, sides[0].reader, a, capacity=capacity, tuning=tuning, launch=launch
        )
    )(q, sides[0].arrays)
    summed = jax.jit(
        lambda p, a: matvec.weighted_values(p, sides[1].reader, a, tuning=tuning, launch=launch)
    )(p, sides[1].arrays)
    for outliers in (True, False):
        of_scores = row_errors(
            found, np.einsum("bkgh,bksh->bkgs", q, sides[0].rows(outliers=outliers))
        ).max()
        of_values = row_errors(
            summed, np.einsum("bkgs,bksh->bkgh", p, sides[1].rows(outliers=outliers))
        ).max()
        for error, format in ((of_scores, case.k), (of_values, case.v)):
            assert (
                (error < TOLERANCE) if outliers or not format.slots else (error > 5 * TOLERANCE)
            ), f"{outliers=}: {error}"


@each
def test_the_products_by_themselves_equal_the_reference(case):
    check_products(case, INTERPRETED)


@pytest.mark.parametrize(("block", "tile"), [(32, 64), (64, 32), (64, 128), (96, 32)])
def test_keys_of_a_shard_stand_where_its_blocks_do(block, tile):
    """Shard 1 of 3, in tiles that are a part of a block or whole blocks; outliers too, with pools
    that all these tiles hold."""
    shard, shards, capacity, tuning = 1, 3, 384, Tuning(tile=tile, cores=2 * HEADS, resident=1)
    case = next(case for case in CASES if case.k.pre_rope and case.k.slots and case.head_dim == 64)
    keys, q = stored(case.k, case.head_dim, 1, HEADS, capacity, 0), case.q[:1]
    reader = dataclasses.replace(keys.reader, block=block, shards=shards)
    scores = jax.jit(
        lambda q, a: matvec.scores(
            q, reader, a, capacity=capacity, tuning=tuning, launch=INTERPRETED
        )
    )
    found = scores(q, [*keys.arrays, np.int32(shard)])
    held = np.arange(capacity)
    tokens = (held // block * shards + shard) * block + held % block

    def error(tokens: np.ndarray) -> float:
        return row_errors(found, np.einsum("bkgh,bksh->bkgs", q, keys.rows(tokens=tokens))).max()

    assert error(tokens) < TOLERANCE
    assert error(tokens + block) > 5 * TOLERANCE, "the blocks of another shard would pass"
    assert error(held + tokens[0]) > 5 * TOLERANCE, "neighbouring blocks would pass"


def test_a_tile_never_begins_and_ends_in_different_parts_of_blocks():
    reader = next(sides_of(case, SHORT)[0].reader for case in CASES if case.k.pre_rope)
    longest = [
        dataclasses.replace(reader, block=block, shards=2).longest_tile
        for block in (32, 64, 96, 128, 160, 192, 512)
    ]
    assert longest == [128, 128, 32, 128, 32, 64, 128]
    assert dataclasses.replace(reader, block=96).longest_tile == 128, (
        "of one shard, blocks are neighbours"
    )


def test_outliers_of_padding_are_not_read():
    q = jnp.ones((2, 2, 1, 64), jnp.float32)
    index = np.broadcast_to(64 * np.arange(128, dtype=np.uint16), (2, 2, 128))  # one of each token
    ends, residual = np.full((2, 2, 2), 128, np.uint16), np.ones((2, 2, 128), np.float32)
    limits = jnp.asarray([0, 128])
    found = outlier_scores(
        q,
        jnp.asarray(index),
        jnp.asarray(residual),
        jnp.asarray(ends),
        limits,
        None,
        INTERPRETED,
        128,
        1,
    )
    assert (found[0] == 0).all()
    assert (found[1, 0, 0, :128] == 1).all(), "all tokens of a pool that is read"
    assert (found[1, 0, 0, 128:] == 0).all(), "no token of one behind the limit"
    assert (found[1, 1] == 0).all(), "no slot belongs to the other head"


def test_what_the_kernels_cannot_read_has_a_reason():
    layout = plane_layout(4, 128, 32)
    assert "5-bit codes" in str(nonuniform(plane_layout(5, 128, 32), None))
    assert "groups of 16 channels" in str(nonuniform(layout, ChannelGroup(1, 16)))
    assert "head_dim 80" in str(nonuniform(plane_layout(4, 80, 32), None))
    assert "not a multiple of 32" in str(nonuniform(plane_layout(4, 128, 16), None))
    assert "outliers of 16 tokens share slots; kernels read those of 32, 64, 128" in str(
        nonuniform(layout, None, pool=16)
    )


def structs_of(case: Case):
    q, limits = (
        jax.ShapeDtypeStruct(case.q.shape, jnp.float32),
        jax.ShapeDtypeStruct((len(LONG.limits),), jnp.int32),
    )
    return q, *(structs(side.arrays) for side in sides_of(case, LONG)), limits


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_lowers_for_cuda(case, arithmetic):
    text = lower_for_cuda(
        lambda *args: attend(case, *args, LONG, None, Launch(arithmetic)), *structs_of(case)
    )
    assert "decode_attention" in text
    assert ("outlier_scores" in text) == bool(case.k.slots)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
@each
def test_every_kernel_runs_on_a_gpu(case, arithmetic):
    """With the usual steps; garbage in unused capacity does not leak."""
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_attention(case, LONG, None, Launch(arithmetic))
    check_garbage(case, LONG, None, Launch(arithmetic))
    check_products(case, Launch(arithmetic))
