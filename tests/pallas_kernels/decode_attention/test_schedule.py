"""Programs share the live tiles of a ragged batch evenly: their tiles and the places of their
pieces, computed as in a kernel.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.decode_attention.schedule import MIN_TILES, Schedule
from pallas_kernels.decode_attention.tuning import Tuning
from pallas_kernels.mosaic import route

H200 = Tuning(tile=128, cores=132, resident=8)


@functools.partial(jax.jit, static_argnames=("schedule", "maximum"))
def runs(limits: jax.Array, schedule: Schedule, maximum: int) -> jax.Array:
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
                runs_so_far.at[i].set(jnp.where(at < end, jnp.stack(run[:5]), -1)),
            )

        return lax.fori_loop(0, maximum, read, (begin, jnp.full((maximum, 5), -1, jnp.int32)))[1]

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
    per = max(MIN_TILES, -(-total // schedule.programs))
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
    "limits", [(0, 0, 0), (1,), (0, 1, 127, 128, 129, 257, 320), (4096, 0, 0, 0, 32)], ids=str
)
def test_every_live_tile_is_read_once_and_no_program_has_more_than_its_share(limits, programs):
    schedule = Schedule(programs, 32, len(limits), 2)
    tiles = check(np.array(limits, np.int32), schedule)
    assert max(tiles) <= max(MIN_TILES, -(-sum(tiles) // programs))


@pytest.mark.parametrize("seed", range(1))
def test_random_lengths_are_shared_out_too(seed):
    rng = np.random.default_rng(seed)
    limits = (rng.integers(0, 2000, 13) * rng.integers(0, 2, 13)).astype(np.int32)
    check(limits, Schedule(int(rng.integers(2, 60)), 32, 13, 3))


def test_there_are_as_many_programs_as_run_at_a_time_and_no_more_than_have_work():
    assert H200.programs(128, 32768) == 132 * 8
    assert Tuning(tile=128, cores=108, resident=5).programs(128, 32768) == 540
    assert H200.programs(8, 4096) == 128
    assert H200.programs(1, 32) == 1


def test_each_warp_of_a_merge_has_a_place_to_read():
    assert Schedule(1, 128, 1, 1).pieces == route.WARPS
    assert Schedule(3, 128, 2, 1).pieces == 5
