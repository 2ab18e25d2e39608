"""Programs share the live tiles of a ragged batch evenly: their tiles and the places of their
pieces, computed as in a kernel.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.decode_attention.schedule import LEAST, Schedule
from pallas_kernels.decode_attention.tuning import Tuning

H200 = Tuning(tile=128, cores=132, resident=8)
RAGGED = np.array([131072, *[1024] * 63], np.int32)  # one long row among short ones
# Bytes per second that an H200 copies, and bytes of a token of one KV head with 4-bit KIVI.
COPY, TOKEN_BYTES = (
    4.3e12,
    2 * 128 * 5 / 8,
)


@functools.partial(jax.jit, static_argnames=("schedule", "most"))
def runs(limits: jax.Array, schedule: Schedule, most: int) -> jax.Array:
    """Return (row, head, first, end, limit) of each program's runs [P, most, 5], or -1 if there is
    none.
    """

    def of(program: jax.Array) -> jax.Array:
        begin, end = schedule.share(limits, program)

        def read(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at, runs_so_far = carry
            run = schedule.run(limits, jnp.minimum(at, end - 1), end)
            return (
                jnp.where(at < end, at + run.end - run.first, at),
                runs_so_far.at[i].set(jnp.where(at < end, jnp.stack(run), -1)),
            )

        return lax.fori_loop(0, most, read, (begin, jnp.full((most, 5), -1, jnp.int32)))[1]

    return jax.vmap(of)(jnp.arange(schedule.programs))


@functools.partial(jax.jit, static_argnames="schedule")
def places(limits: jax.Array, schedule: Schedule) -> tuple[jax.Array, jax.Array]:
    """Return (first, end) of the pieces of each row and head [B, K]."""
    rows, heads = jnp.arange(schedule.batch), jnp.arange(schedule.heads)
    return jax.vmap(
        lambda row: jax.vmap(lambda head: schedule.pieces_of(limits, row, head))(heads)
    )(rows)


def check(limits: np.ndarray, schedule: Schedule) -> list[int]:
    """Check a schedule and return the tiles of each program."""
    total = schedule.heads * int(np.sum(-(-limits // schedule.tile)))
    per = max(LEAST, -(-total // schedule.programs))
    of_all = np.asarray(runs(jnp.asarray(limits), schedule, per))
    read, pieces, of_programs = Counter[tuple[int, int, int]](), dict[int, tuple[int, int]](), []
    for program, of_program in enumerate(of_all):
        of_program = of_program[of_program[:, 0] >= 0]
        of_programs.append(int(np.sum(of_program[:, 3] - of_program[:, 2])))
        for row, head, first, end, limit in of_program:
            assert limit == limits[row]
            read.update((int(row), int(head), tile) for tile in range(first, end))
            place = program + int(row) * schedule.heads + int(head)
            assert place not in pieces, "two pieces in one place"
            pieces[place] = int(row), int(head)
    wanted = {
        (b, k, t)
        for b, limit in enumerate(limits)
        for k in range(schedule.heads)
        for t in range(-(-int(limit) // schedule.tile))
    }
    assert set(read) == wanted, "not all live tiles are read, or others are"
    assert set(read.values()) <= {1}, "a tile is read twice"
    first, end = (np.asarray(x) for x in places(jnp.asarray(limits), schedule))
    assert max(pieces, default=0) < schedule.pieces
    for b in range(schedule.batch):
        for k in range(schedule.heads):
            of_unit = [place for place, unit in pieces.items() if unit == (b, k)]
            assert of_unit == list(range(first[b, k], end[b, k])), (
                f"row {b}, head {k}: pieces in {of_unit}, merged {first[b, k]}..{end[b, k]}"
            )
    return of_programs


@pytest.mark.parametrize("programs", [1, 32])
@pytest.mark.parametrize(
    "limits",
    [
        (0, 0, 0),
        (1,),
        (0, 1, 127, 128, 129, 257, 320),
        (4096, 0, 0, 0, 32),
    ],
    ids=str,
)
def test_every_live_tile_is_read_once_and_no_program_has_more_than_its_share(limits, programs):
    schedule = Schedule(programs, 32, len(limits), 2)
    tiles = check(np.array(limits, np.int32), schedule)
    assert max(tiles) <= max(LEAST, -(-sum(tiles) // programs))


@pytest.mark.parametrize("seed", range(1))
def test_random_lengths_are_shared_out_too(seed):
    rng = np.random.default_rng(seed)
    limits = (rng.integers(0, 2000, 13) * rng.integers(0, 2, 13)).astype(np.int32)
    check(limits, Schedule(int(rng.integers(2, 60)), 32, 13, 3))


def from_the_capacity(limits: np.ndarray, tuning: Tuning, heads: int) -> list[int]:
    """Return the tiles of each program if each row is cut into as many splits as its capacity asks
    for.
    """
    splits = tuning.splits(len(limits) * heads, int(limits.max()))
    per_split = np.ceil(np.ceil(limits / splits) / tuning.tile).astype(int)
    return [
        int(min(per, max(0, -(-limit // tuning.tile) - s * per)))
        for limit, per in zip(limits, per_split, strict=True)
        for s in range(splits)
    ]


def test_one_long_row_among_short_ones_takes_what_its_bytes_take():
    """Model an H200 in rounds. All programs run at the same time, so a batch takes as long as the
    longest program's tiles. Its bytes alone would take the mean.
    """
    heads = 8
    schedule = Schedule(
        H200.programs(len(RAGGED) * heads, int(RAGGED.max())), H200.tile, len(RAGGED), heads
    )
    assert schedule.programs == 132 * 8, (
        "eight programs on each multiprocessor, and no second round"
    )
    total = heads * int(np.sum(-(-RAGGED // H200.tile)))
    per = int(schedule.per_program(jnp.int32(total)))
    mean = total / schedule.programs
    assert per <= mean + 1
    before = from_the_capacity(RAGGED, H200, heads)
    assert max(before) > 40 * mean, "the splits of before would do as well"
    bytes_us = heads * int(RAGGED.sum()) * TOKEN_BYTES / COPY * 1e6
    us_of_a_tile = bytes_us / mean  # at the memory's speed, with all programs at work
    assert us_of_a_tile * (per + 1) < 1.2 * bytes_us, "the wait for the first tile included"
    assert us_of_a_tile * max(before) > 2000


def test_there_are_as_many_programs_as_run_at_a_time_and_no_more_than_have_work():
    assert H200.programs(128, 32768) == 132 * 8
    assert Tuning(tile=128, cores=108, resident=5).programs(128, 32768) == 540
    assert H200.programs(8, 4096) == 128
    assert H200.programs(1, 32) == 1
