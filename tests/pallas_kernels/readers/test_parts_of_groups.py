"""A step that is a part of a group of tokens reads the group's scale and zero: keys and values,
attention and the products alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.grouped_array import GroupFormat
from pallas_kernels.decode_attention import matvec
from pallas_kernels.decode_attention.tuning import TUNING, Tuning, tuning_for
from pallas_kernels.launch import Launch
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.tile import Tile
from tests.pallas_kernels.decode_attention.test_decode import (
    GARBAGE,
    attend,
    check_garbage,
    check_lengths,
    rows,
    tuned,
)
from tests.pallas_kernels.kernel_cases import (
    KernelCase,
    Lengths,
    format_of,
    reader_of,
    row_errors,
    rows_with_neighbours_scales,
    stored_rows,
    stored_structs,
)
from tests.pallas_kernels.lowering import lower_for_cuda

INTERPRETED = Launch(interpret=True)
CASE = KernelCase(
    "groups_of_128",
    format_of(2, "asym", "tokens", 64, 128),
    format_of(3, "sym", "tokens", 64, 128),
    64,
    4,
)
# kivi:bits=4,group_size=128 as it is served: no tuning is given, and a step of 64 tokens is chosen
K, V = (GroupFormat(4, "asym", axis, 128, 128, 128) for axis in ("tokens", "channels"))
SERVED = KernelCase("kivi4_size128", K, V, 128, 4)
LONG = Lengths(
    1152, (0, 1, 63, 64, 65, 1025, 1152)
)  # whole groups; several splits, as they are chosen on a GPU
TOLERANCE = 3e-3


@pytest.mark.parametrize("tile", [32, 64])
def test_attention_of_every_length_equals_the_reference(tile):
    lengths = Lengths(384, (0, 1, tile - 1, tile, tile + 1, 4 * tile + 1, 384))
    check_lengths(CASE, lengths, tuned(2, tile), INTERPRETED)
    for garbage in GARBAGE:
        check_garbage(CASE, lengths, tuned(2, tile), INTERPRETED, garbage)


def products(case: KernelCase, capacity: int, tuning: Tuning | None, launch: Launch):
    """(q, p, rows) -> q K^T and p V over the same rows, stored as keys are. A tuning of None is the
    usual one of each product."""
    reader = reader_of(case.k, case.head_dim)

    def both(q, p, stored):
        scores = matvec.scores(q, reader, stored, capacity=capacity, tuning=tuning, launch=launch)
        return scores, matvec.weighted_values(
            p, reader, stored, tuning=tuning or TUNING, launch=launch
        )

    return jax.jit(both)


def check_products(case: KernelCase, capacity: int, tuning: Tuning | None, launch: Launch) -> None:
    exact = rows(case.head_dim, 0, Lengths(capacity, (capacity,)))
    stored, meant = stored_rows(case.k, exact)
    moved = rows_with_neighbours_scales(case.k, exact)
    assert moved is not None
    q = jnp.asarray(
        np.random.default_rng(5).standard_normal((1, 2, case.group, case.head_dim)), jnp.float32
    )
    p = jnp.asarray(np.random.default_rng(6).random((1, 2, case.group, capacity)), jnp.float32)
    scores, values = products(case, capacity, tuning, launch)(q, p, stored)
    for found, equation, x in ((scores, "bkgh,bksh->bkgs", q), (values, "bkgs,bksh->bkgh", p)):
        assert row_errors(found, np.einsum(equation, x, meant)).max() < TOLERANCE
        assert row_errors(found, np.einsum(equation, x, moved)).max() > 10 * TOLERANCE, (
            "a neighbour's scales would pass"
        )


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_products_alone_equal_the_reference(tile):
    check_products(CASE, 384, tuned(1, tile), INTERPRETED)


def test_the_usual_step_is_half_of_a_served_group():
    k, v = (reader_of(f, SERVED.head_dim) for f in (SERVED.k, SERVED.v))
    assert isinstance(k, GroupedReader)
    assert (k.group, tuning_for(k, v, 8, LONG.capacity, False).tile) == (128, 64)


def check_served(launch: Launch) -> None:
    check_lengths(SERVED, LONG, None, launch)
    for garbage in GARBAGE:
        check_garbage(SERVED, LONG, None, launch, garbage)
    check_products(SERVED, LONG.capacity, None, launch)


def test_usual_steps_equal_the_reference():
    check_served(INTERPRETED)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_usual_steps_lower_for_cuda(arithmetic):
    launch, struct = Launch(arithmetic), jax.ShapeDtypeStruct
    q, p = (
        struct((2, 2, SERVED.group, last), jnp.float32) for last in (SERVED.head_dim, LONG.capacity)
    )
    k, v = (stored_structs(f, 2, 2, LONG.capacity, SERVED.head_dim) for f in (SERVED.k, SERVED.v))

    def both(q, p, k, v, limits):
        return attend(SERVED, q, k, v, limits, LONG.capacity, None, launch), products(
            SERVED, LONG.capacity, None, launch
        )(q, p, k)

    text = lower_for_cuda(both, q, p, k, v, struct((2,), jnp.int32))
    for name in ("decode_attention", "matvec_scores", "matvec_values"):
        assert name in text


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_usual_steps_run_on_a_gpu(arithmetic):
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU in this process")
    check_served(Launch(arithmetic))


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_offsets_name_the_unit_that_holds_the_start(size):
    """A whole tile knows its number; a tile that starts anywhere divides its start."""
    for i in range(6):
        whole, anywhere = (
            Tile(size, jnp.asarray(i * size), jnp.asarray(i)),
            Tile(size, jnp.asarray(i * size), None),
        )
        for unit in (1, 32, 128, 512):
            assert int(whole.offset(unit)) == int(anywhere.offset(unit)) == i * size // unit
