"""The kernel that appends a block to a body writes the bits of quantize_rows in their place, and
changes nothing else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import Launch
from pallas_kernels.quantize.append import Blocks, Places, Rows, Side, append_token
from pallas_kernels.quantize.blocks import GroupedBlocks
from pallas_kernels.quantize.kernel import PackedRows
from pallas_kernels.quantize.rounding import Job
from tests.pallas_kernels.harness import INTERPRETED, anywhere, each_lowering, launches
from tests.pallas_kernels.lowering import lower_for_cuda
from tests.pallas_kernels.quantize.placement import misplaced_rows
from tests.pallas_kernels.quantize.test_quantize import (
    CASES,
    QuantizeCase,
    divisor_of,
    fused,
    reader_of,
    special_rows,
)

BODY = 192  # tokens
RING = 3  # blocks
LEAVING = np.array([1, 0, 1], np.int32)


def block_of(case: QuantizeCase) -> int:
    return 64 if case.format.axis == "tokens" and case.format.group_size == 64 else 32


@functools.partial(jax.jit, static_argnames=("case", "launch"))
def append(
    case: QuantizeCase,
    body: PackedRows,
    ring: jax.Array,
    first: jax.Array,
    leaving: jax.Array,
    divisor: jax.Array | None,
    launch: Launch,
):
    row, none = jnp.zeros_like(ring[:, :, :1]), jnp.zeros(len(ring), bool)
    job = Job(
        reader_of(case.format), case.scheme, case.format.bits, divisor is not None, 1, launch.asm
    )
    blocks = Blocks(jax.tree.leaves(body), GroupedBlocks(job), [] if divisor is None else [divisor])
    places = Places(first, none, first, first, leaving > 0)
    [side], _ = append_token(
        [Side(row, ring[:, :, :0], ring, blocks)], places, block=block_of(case), launch=launch
    )
    assert isinstance(side.blocks, Blocks)
    return jax.tree.unflatten(jax.tree.structure(body), side.blocks.body)


def arrays_of(case: QuantizeCase, packed: PackedRows) -> dict[str, np.ndarray]:
    """Return the bits of the arrays, with tokens on axis 2."""
    swap = case.format.axis == "channels"
    scales = {"scale": packed.scale} | ({} if packed.zero is None else {"zero": packed.zero})
    actual = {f"words {i}": np.asarray(w) for i, w in enumerate(packed.words)}
    actual |= {
        name: np.swapaxes(np.asarray(a), 2, 3) if swap else np.asarray(a)
        for name, a in scales.items()
    }
    return {name: array.view(f"u{array.itemsize}") for name, array in actual.items()}


def wrong_in(
    case: QuantizeCase,
    ring: jax.Array,
    before: PackedRows,
    after: PackedRows,
    first: np.ndarray,
    leaving: np.ndarray,
    launch: Launch,
) -> list[str]:
    """Name every wrong row and array. `first` is as in `Places`."""
    block, slots = block_of(case), ring.shape[2]
    rows = jnp.stack([ring[b][:, (first[b] + np.arange(block)) % slots] for b in range(len(ring))])
    new = arrays_of(case, fused(case, rows, divisor_of(case, len(ring)), launch))
    old, actual = arrays_of(case, before), arrays_of(case, after)
    return [
        f"{name} of row {b}"
        for name, array in actual.items()
        for b in misplaced_rows(
            old[name], array, new[name], first * new[name].shape[2] // block, leaving, 2
        )
    ]


def inputs_of(case: QuantizeCase) -> tuple[PackedRows, jax.Array, np.ndarray]:
    """Return a body of other rows, a ring, and the tokens where blocks are written: the first, a
    middle and the last place.
    """
    rng, block = np.random.default_rng(2), block_of(case)
    shape = (len(LEAVING), 2, BODY, case.format.channels)
    body = fused(
        case,
        jnp.asarray(rng.normal(size=shape), case.dtype),
        divisor_of(case, len(LEAVING)),
        INTERPRETED,
    )
    ring = np.asarray(rng.normal(size=(*shape[:2], RING * block, shape[3])), np.float32)
    ring[0] = (
        special_rows(case)[1, :, : RING * block].astype(jnp.float32)
        if RING * block <= 128
        else ring[0]
    )
    return body, jnp.asarray(ring, case.dtype), np.array([0, block, BODY - block], np.int32)


@launches(CASES, (CASES[6], CASES[9]), (CASES[7],))
def test_a_block_is_written_in_its_place_and_nothing_else(case, launch):
    body, ring, first = inputs_of(case)
    after = append(case, body, ring, first, LEAVING, divisor_of(case, 3), launch)
    assert not (wrong := wrong_in(case, ring, body, after, first, LEAVING, launch)), wrong
    assert wrong_in(case, ring, body, after, first, np.ones_like(LEAVING), launch), (
        "a row that keeps its block would pass for any other"
    )
    assert wrong_in(case, jnp.roll(ring, block_of(case), 2), body, after, first, LEAVING, launch), (
        "another block of the ring would pass"
    )


def test_a_ring_that_would_wrap_within_a_group_is_refused():
    case = CASES[2]
    body, ring, first = inputs_of(case)
    with pytest.raises(
        ValueError,
        match="a ring of 95 slots does not hold a block of 32 tokens in whole runs of 32",
    ):
        append(case, body, ring[:, :, :95], first, LEAVING, None, INTERPRETED)


SINK, SLOTS = 3, 64
POSITIONS = np.array([1, SINK, SINK + SLOTS + 5, SINK + 7], np.int32)
NEW = np.array([True, True, True, False])


@anywhere
def test_a_new_token_is_one_row_of_the_ring_and_of_the_sink(launch):
    rng = np.random.default_rng(4)
    shape = (len(NEW), 2)
    sides = [
        [rng.normal(size=(*shape, count, 64)).astype(np.float32) for count in (1, SINK, SLOTS)]
        for _ in "kv"
    ]
    wanted = [[sink.copy(), ring.copy()] for _, sink, ring in sides]
    for (row, _, _), (sink, ring) in zip(sides, wanted, strict=True):
        sink[0, :, 1] = row[0, :, 0]
        # The first token comes before the ring's first token, so its slot is still free.
        for b, slot in enumerate([SLOTS - 2, 0, 5]):
            ring[b, :, slot] = row[b, :, 0]
    zeros = jnp.zeros(len(NEW), jnp.int32)
    before = [Side(*map(jnp.asarray, side), None) for side in sides]
    actual, _ = append_token(
        before,
        Places(jnp.asarray(POSITIONS), jnp.asarray(NEW), zeros, zeros, zeros > 0),
        block=32,
        launch=launch,
    )
    for after, before, (sink, ring) in zip(actual, sides, wanted, strict=True):
        np.testing.assert_array_equal(after.sink, sink)
        np.testing.assert_array_equal(after.ring, ring)
        assert (sink != before[1]).any(axis=(1, 2, 3)).tolist() == [True, False, False, False]
        assert (ring != before[2]).any(axis=(1, 2, 3)).tolist() == [True, True, True, False]


@each_lowering(CASES, CASES[::3])
def test_every_case_lowers_for_cuda(case, arithmetic):
    body, ring, first = inputs_of(case)
    text = lower_for_cuda(
        lambda *inputs: append(case, *inputs, Launch(arithmetic)),
        *(body, ring, first, LEAVING, divisor_of(case, len(LEAVING))),
    )
    assert "append_token" in text, "the kernel has lost its name"


def rows_and_places() -> tuple[jax.Array, jax.Array, jax.Array, Places]:
    """Return a body of rows, a ring of one slot, new rows, and their places in a shard, which are
    numbered differently from the whole.
    """
    rng = np.random.default_rng(3)
    body, ring, row = (
        jnp.asarray(rng.normal(size=(3, 2, tokens, 64)), jnp.bfloat16) for tokens in (40, 1, 1)
    )
    place, leaving = jnp.asarray([0, 7, 39]), jnp.asarray([True, False, True])
    return (
        body,
        ring,
        row,
        Places(2 * place + 1, jnp.asarray([True, False, True]), 2 * place + 1, place, leaving),
    )


def append_rows(
    body: jax.Array, ring: jax.Array, row: jax.Array, places: Places, launch: Launch, block: int = 1
) -> jax.Array:
    [side], _ = append_token(
        [Side(row, ring[:, :, :0], ring, Rows(body))], places, block=block, launch=launch
    )
    assert isinstance(side.blocks, Rows)
    return side.blocks.body


@anywhere
def test_a_body_of_rows_takes_the_new_one_where_it_leaves_and_nothing_else(launch):
    body, ring, row, places = rows_and_places()
    expected = np.asarray(body).copy()
    for b, at in ((0, 0), (2, 39)):
        expected[b, :, at] = np.asarray(row)[b, :, 0]
    assert not np.array_equal(expected, body), "nothing is written"
    np.testing.assert_array_equal(append_rows(body, ring, row, places, launch), expected)
    with pytest.raises(ValueError, match="blocks of 32 tokens"):
        append_rows(body, ring, row, places, launch, block=32)


def test_a_body_of_rows_lowers_for_cuda():
    text = lower_for_cuda(lambda *inputs: append_rows(*inputs, Launch()), *rows_and_places())
    assert "append_token" in text
