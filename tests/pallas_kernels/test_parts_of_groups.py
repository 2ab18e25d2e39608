"""A step that is a part of a group of tokens reads the group's scale and zero: keys and values, attention and the products alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import matvec
from pallas_kernels._launch import Launch
from pallas_kernels.tile import Tile
from tests.pallas_kernels.kernel_cases import KernelCase, Lengths, format_of, row_errors, rows_with_neighbours_scales, side_of, stored_rows
from tests.pallas_kernels.test_decode import GARBAGE, check_garbage, check_lengths, rows, tuned

INTERPRETED = Launch(interpret=True)
CASE = KernelCase("groups_of_128", format_of(2, "asym", "tokens", 64, 128), format_of(3, "sym", "tokens", 64, 128), 64, 4)
TOLERANCE = 2e-3


@pytest.mark.parametrize("tile", [32, 64])
def test_attention_of_every_length_equals_the_reference(tile):
    lengths = Lengths(384, (0, 1, tile - 1, tile, tile + 1, 4 * tile + 1, 384))
    check_lengths(CASE, lengths, tuned(2, tile), INTERPRETED)
    for garbage in GARBAGE:
        check_garbage(CASE, lengths, tuned(2, tile), INTERPRETED, garbage)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_products_alone_equal_the_reference(tile):
    assert CASE.k is not None
    exact = rows(64, 0, Lengths(384, (384,)))
    stored, meant = stored_rows(CASE.k, exact)
    moved, side = rows_with_neighbours_scales(CASE.k, exact), side_of(CASE.k, 64)
    q = jnp.asarray(np.random.default_rng(5).standard_normal((1, 2, 4, 64)), jnp.float32)
    p = jnp.asarray(np.random.default_rng(6).random((1, 2, 4, 384)), jnp.float32)
    scores = jax.jit(lambda q, a: matvec.scores(q, side, a, capacity=384, tuning=tuned(1, tile), how=INTERPRETED))(q, stored)
    values = jax.jit(lambda p, a: matvec.weighted_values(p, side, a, tuning=tuned(1, tile), how=INTERPRETED))(p, stored)
    for found, equation, x in ((scores, "bkgh,bksh->bkgs", q), (values, "bkgs,bksh->bkgh", p)):
        assert row_errors(found, np.einsum(equation, x, meant)).max() < TOLERANCE
        assert row_errors(found, np.einsum(equation, x, moved)).max() > 10 * TOLERANCE, "a neighbour's scales would pass"


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_offsets_name_the_unit_that_holds_the_start(size):
    """Of a whole tile, which knows its number, and of one that starts anywhere, the same."""
    for i in range(6):
        whole, anywhere = Tile(size, jnp.asarray(i * size), jnp.asarray(i)), Tile(size, jnp.asarray(i * size), None)
        for unit in (1, 32, 128, 512):
            assert int(whole.offset(unit)) == int(anywhere.offset(unit)) == i * size // unit
