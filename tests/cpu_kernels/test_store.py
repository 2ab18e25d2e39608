"""Blocks written in place by the C++ kernel, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels.library import unavailable
from cpu_kernels.store import store_blocks

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

SHAPES = {
    "int16": (3, 2, 12, 5),
    "uint16": (3, 2, 4, 24),
    "float32": (3, 2, 6, 7),
    "int8": (3, 12),
}  # of 6 blocks each
AXES, ENTRIES = (
    {"int16": 2, "uint16": 3, "float32": 2, "int8": 1},
    {"int16": 2, "uint16": 4, "float32": 1, "int8": 2},
)
BLOCKS = 2  # new ones for each row
CASES = {
    "inside": ([0, 3, 4], [1, 2, 2]),
    "nothing": ([5, 0, 2], [0, 0, 0]),
    "past the end": ([5, 6, -1], [2, 1, 1]),
    "too many": ([0, 1, 2], [9, 2, 0]),
}


def arrays() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    stored = [rng.integers(0, 100, shape).astype(dtype) for dtype, shape in SHAPES.items()]
    shapes = {
        d: tuple(BLOCKS * ENTRIES[d] if i == AXES[d] else n for i, n in enumerate(shape))
        for d, shape in SHAPES.items()
    }
    return stored, [rng.integers(100, 120, shape).astype(dtype) for dtype, shape in shapes.items()]


def expected(
    stored: list[np.ndarray], blocks: list[np.ndarray], first: list[int], count: list[int]
) -> list[np.ndarray]:
    written = []
    for old, new, axis, per in zip(stored, blocks, AXES.values(), ENTRIES.values(), strict=True):
        old = np.moveaxis(old, axis, 1).copy()
        for b, (start, many) in enumerate(zip(first, count, strict=True)):
            rows = np.moveaxis(new, axis, 1)[b, : many * per]
            if 0 <= start * per < old.shape[1]:
                room = old[b, start * per : start * per + len(rows)]
                room[:] = rows[: len(room)]
        written.append(np.moveaxis(old, 1, axis))
    return written


@functools.partial(jax.jit, donate_argnums=0)
def write(stored, blocks, first, count):
    return store_blocks(
        stored, blocks, first, count, axes=list(AXES.values()), entries=list(ENTRIES.values())
    )


@pytest.mark.parametrize("case", CASES)
def test_blocks_land_where_they_belong_and_nothing_else_changes(case: str):
    first, count = CASES[case]
    stored, blocks = arrays()
    want = expected(stored, blocks, first, count)
    written = write(
        [jnp.asarray(a) for a in stored], blocks, jnp.asarray(first), jnp.asarray(count)
    )
    for dtype, new, old, right in zip(SHAPES, written, stored, want, strict=True):
        np.testing.assert_array_equal(new, right, err_msg=dtype)
        assert (case != "nothing") == bool((np.asarray(new) != old).any()), (
            f"{dtype}: the comparison would not see it"
        )


def test_what_lies_behind_the_end_is_left_out():
    rows = jnp.zeros((2, 7), jnp.int8)  # the last block has one entry
    blocks = jnp.asarray([[1, 2, 3, 4]] * 2, jnp.int8)
    first, count = jnp.array([3, -1]), jnp.array([2, 2])
    [written] = store_blocks([rows], [blocks], first, count, axes=[1], entries=[2])
    np.testing.assert_array_equal(written, [[0] * 6 + [1], [0] * 7])


def test_donated_arrays_are_written_where_they_lie():
    stored, blocks = arrays()
    donated = [jnp.asarray(a) for a in stored]
    program = write.lower(donated, blocks, jnp.zeros(3, int), jnp.ones(3, int)).compile()
    assert program.memory_analysis().alias_size_in_bytes == sum(a.nbytes for a in stored)
    places = [a.unsafe_buffer_pointer() for a in donated]
    written = program(donated, blocks, jnp.zeros(3, int), jnp.ones(3, int))
    assert [a.unsafe_buffer_pointer() for a in written] == places


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("blocks", "axes", "entries"),
    [
        ((3, 2, 2, 6), [2], [1]),  # another number of channels
        ((3, 2, 2, 5), [4], [1]),  # no such axis
        ((3, 2, 2, 5), [0], [1]),  # the batch
        ((3, 2, 2, 5), [2], [0]),  # blocks of nothing
        ((3, 2, 2, 5), [2, 2], [1, 1]),  # an axis too many
    ],
)
def test_arrays_that_do_not_fit_are_an_error(
    blocks: tuple[int, ...], axes: list[int], entries: list[int]
):
    old = jnp.zeros((3, 2, 12, 5), jnp.int16)
    with pytest.raises(Exception, match="kvq_store_blocks"):
        jax.block_until_ready(
            store_blocks(
                [old],
                [jnp.ones(blocks, jnp.int16)],
                jnp.zeros(3, int),
                jnp.ones(3, int),
                axes=axes,
                entries=entries,
            )
        )
