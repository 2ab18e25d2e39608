"""Cut runs of channels into chunks of 16 lanes, and read the words of a chunk (runs.py).

The number n of tokens in a row of words depends on the bits b of a run. All runs are read as if
they had the 16 tokens of the thinnest plane: a slot of n is 16 / n of those slots, which lie in
neighbouring rows. A tile is 256 tokens, 16 rows of each slot. A step takes the same four slots of
every run, a fourth of the tile. Words that hold more slots are read again, from the first level of
the cache.

A dot takes chunks of 16 channels. A run of an odd multiple of 8 ends in half a chunk, which it
shares with the next such run, so the last chunks hold channels of two runs each. Their words are
chosen as they are loaded: each thread loads the words of its run, and fields that both runs store
alike are unpacked once for the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Int16

from pallas_kernels.tiles.arithmetic import half_add, subtract_constant
from pallas_kernels.tiles.halves import Half
from pallas_kernels.tiles.layout import SPAN, PlaneLayout
from pallas_kernels.tiles.tile import Tile
from pallas_kernels.triton_call import plt

SLOTS = 16
ROWS = 16  # of a slot, the fewest that tensor cores take
TILE = ROWS * SLOTS
RUN = SPAN // SLOTS  # neighbouring tokens of a slot
WIDTH = 16  # channels of a chunk, the fewest that tensor cores sum over
HALF = WIDTH // 2  # the fewest channels of a run; two such runs share a chunk


class RunPiece(NamedTuple):
    """Neighbouring channels of a run, from a column on: all WIDTH lanes of a chunk, or HALF of
    them.
    """

    run: int
    column: int
    channels: int


class PlaneWords(NamedTuple):
    """The words of one plane set of a piece. `half` is the half of its chunk that holds the piece,
    if the piece is half a chunk.
    """

    ref: Any
    layout: PlaneLayout
    piece: RunPiece
    half: int

    def read(
        self, tile: Tile, unit: Int[Array, ""], others: Int16[Array, "16 16"] | None
    ) -> Int16[Array, "16 16"]:
        """Read the words of a unit of slots. `others` are the words of the lanes outside the piece,
        or None for 0.
        """
        slots = self.layout.slots
        number = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
        rows = tile.offset(slots) + number // RUN * (SPAN // slots) + number % RUN
        # slots that one slot of the layout is read as, RUN rows of a span each
        shared = SLOTS // slots
        rows = rows + RUN * lax.rem(unit, shared)
        column = lax.div(unit, shared) * self.layout.channels + self.piece.column
        if self.piece.channels == WIDTH:
            return self.ref[rows, pl.ds(column, WIDTH)]
        lane = lax.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1)
        of_piece = lane >= HALF if self.half else lane < HALF
        # A remainder stays inside the array, and Triton knows that eight of them are neighbours and
        # loads them together.
        place = self.ref.at[rows[:, None], column + lax.rem(lane, jnp.int32(HALF))]
        return plt.load(place, mask=of_piece, other=jnp.int16(0) if others is None else others)


def pieces_of_chunks(layouts: Sequence[PlaneLayout]) -> tuple[tuple[RunPiece, ...], ...]:
    """Return the content of each stored chunk: first the whole chunks of every run, then the
    remaining halves of the runs, two to a chunk.
    """
    whole = [
        (RunPiece(i, at, WIDTH),)
        for i, p in enumerate(layouts)
        for at in range(0, p.channels - HALF, WIDTH)
    ]
    rest = [
        RunPiece(i, p.channels - HALF, HALF) for i, p in enumerate(layouts) if p.channels % WIDTH
    ]
    return (*whole, *(tuple(rest[i : i + 2]) for i in range(0, len(rest), 2)))


def channels_of_lanes(layouts: Sequence[PlaneLayout]) -> np.ndarray:
    """Return the sorted channel in each lane of the chunks."""
    starts = np.cumsum([0, *(layout.channels for layout in layouts)])
    pieces = [
        starts[p.run] + p.column + np.arange(p.channels)
        for of_chunk in pieces_of_chunks(layouts)
        for p in of_chunk
    ]
    return np.concatenate(pieces)


def planes_of_chunk(
    layouts: Sequence[PlaneLayout], refs: Sequence[Any], pieces: Sequence[RunPiece]
) -> dict[tuple[int, int], list[PlaneWords]]:
    """Return the words of a chunk by the bits of a code that they hold: (the lowest bit, how
    many).

    The words of two runs are one tile if they hold the same bits of their codes. Otherwise they
    are separate tiles, with 0 in the lanes of the run that has no such words.
    """
    planes: dict[tuple[int, int], list[PlaneWords]] = {}
    for half, piece in enumerate(pieces):
        layout, at = layouts[piece.run], 0
        before = sum(len(other.sets) for other in layouts[: piece.run])
        for ref, bits in zip(refs[before:], layout.sets, strict=False):
            planes.setdefault((at, bits), []).append(PlaneWords(ref, layout, piece, half))
            at += bits
    return dict(sorted(planes.items()))


def taken(array: Array, places: np.ndarray) -> Array:
    """Return the entries at these places of the last axis, or the array itself if the places are
    consecutive.
    """
    return array if (np.diff(places) == 1).all() else jnp.take(array, places, axis=-1, mode="clip")


def subtracted(numbers: Half, constants: Sequence[float], asm: bool) -> Half:
    """Return the numbers of a chunk minus one constant, or minus one for each half."""
    if len(constants) == 1:
        return subtract_constant(numbers, constants[0], asm)
    lane = lax.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1)
    first, second = (jnp.float16(-constant) for constant in constants)
    return half_add(numbers, jnp.where(lane < HALF, first, second), asm)
