"""A step that is a part of a group of tokens reads the group's scale and zero point."""

import jax.numpy as jnp
import pytest

from kvq_jax.arrays.grouped_array import GroupFormat
from pallas_kernels.decode_attention.tuning import tuning_for
from pallas_kernels.launch import Launch
from pallas_kernels.readers.grouped import GroupedReader
from pallas_kernels.tiles.tile import Tile
from tests.exhaustive import some
from tests.pallas_kernels.grouped_sides import format_of, grouped_side
from tests.pallas_kernels.harness import (
    KernelCase,
    Lengths,
    anywhere,
    check_attention,
    check_unused_capacity,
    lowered_attention,
    tuned,
)

CASE = KernelCase(
    "groups_of_128",
    grouped_side(format_of(2, "asym", "tokens", 64, 128)),
    grouped_side(format_of(3, "sym", "tokens", 64, 128)),
    64,
)
# kivi:bits=4,group_size=128 as it is served: a step of 64 tokens is the default
K, V = (grouped_side(GroupFormat(4, "asym", a, 128, 128, 128)) for a in ("tokens", "channels"))
LONG = Lengths(1152, (0, 1, 63, 64, 65, 1025, 1152))  # whole groups, in several splits
SERVED = KernelCase("kivi4_size128", K, V, 128, long=LONG, garbage=(float("nan"),))


@pytest.mark.parametrize("tile", some((32, 64), (32,)))
def test_attention_of_every_length_equals_the_reference(tile):
    lengths = Lengths(384, (0, 1, tile - 1, tile, tile + 1, 4 * tile + 1, 384))
    check_attention(CASE, lengths, tuned(2, tile))
    check_unused_capacity(CASE, lengths, tuned(2, tile))


def test_the_default_step_is_half_of_a_served_group():
    k, v = (side.reader for side in SERVED.sides(LONG))
    assert isinstance(k, GroupedReader)
    assert (k.group, tuning_for(k, v, 8, LONG.capacity, False).tile) == (128, 64)


@anywhere
def test_default_steps_equal_the_reference(launch):
    check_attention(SERVED, LONG, None, launch)
    check_unused_capacity(SERVED, LONG, None, launch)


@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_default_steps_lower_for_cuda(arithmetic):
    assert "decode_attention" in lowered_attention(SERVED, Launch(arithmetic))


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_offsets_name_the_unit_that_holds_the_start(size):
    """A whole tile has a number. A tile that starts anywhere divides its start."""
    for i in range(6):
        whole = Tile(size, jnp.asarray(i * size), jnp.asarray(i))
        anywhere = Tile(size, jnp.asarray(i * size), None)
        for unit in (1, 32, 128, 512):
            assert int(whole.offset(unit)) == int(anywhere.offset(unit)) == i * size // unit
