"""Tile sizes, stages and splits of the decode-attention kernel: they change its speed, never its result."""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental import pallas as pl

from pallas_kernels.readers.base import Side
from pallas_kernels.readers.codebook import Codebook
from pallas_kernels.readers.dense import Dense
from pallas_kernels.readers.grouped import Grouped
from pallas_kernels.readers.polar import Polar
from pallas_kernels.readers.rotary import Rotated
from pallas_kernels.tiles.tile import SPAN


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What changes only the speed. tile: tokens of a loop step; warps and stages: Triton's; cores: multiprocessors, None for as many as the
    device has; resident: programs that run on one of them at a time. The number of splits follows from both (docs/kernels.md)."""

    tile: int = 128
    warps: int = 1
    stages: int = 3
    cores: int | None = None
    resident: int = 8

    def splits(self, programs: int, capacity: int) -> int:
        """Splits of the token axis for `programs` rows times KV heads, at least two tiles in each.

        The number that takes the least time: programs run in rounds of as many as the device holds at a time, and each reads its tiles,
        after as long as one takes to arrive. A few programs more than a round would keep the device as long as two."""
        running = (device_cores() if self.cores is None else self.cores) * self.resident
        tiles = capacity // self.tile
        most = max(1, min(tiles // 2, 4 * pl.cdiv(running, programs)))
        return min(range(1, most + 1), key=lambda splits: pl.cdiv(programs * splits, running) * (pl.cdiv(tiles, splits) + 1))


def device_cores() -> int:
    """Multiprocessors of the device that this process runs on; those of an H200 where that is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_CORES


TUNING = Tuning()


H200_CORES = 132


WARPS = 8  # that a multiprocessor's 65536 registers hold, of kernels that use 255


SHARED_BYTES = 233472  # of a multiprocessor of Hopper


OTHER_SHARED_BYTES = 3072  # of a program: for rearranging, and what the system keeps


# (tokens of a step, stages) by head dim and code bits, for codes without a zero and with one: the most that a program's 255 registers hold
# without spilling in the loop, counted from machine code (docs/kernels.md). Larger steps leave fewer loads that are not asynchronous.
_STEPS = {
    (128, 2): ((128, 3), (128, 3)),
    (128, 3): ((128, 2), (64, 3)),
    (128, 4): ((128, 3), (64, 3)),
    (128, 5): ((64, 3), (64, 3)),
    (128, 8): ((64, 2), (64, 2)),
    (256, 2): ((64, 3), (64, 3)),
    (256, 3): ((32, 3), (32, 3)),
    (256, 4): ((32, 3), (32, 3)),
    (256, 5): ((32, 3), (32, 3)),
    (256, 8): ((32, 2), (32, 2)),
}


def tuning_for(k: Side, v: Side, channels: int, columns: int, capacity: int, asm: bool) -> Tuning:
    """The usual step for these sides, no larger than the capacity, and how many such programs a multiprocessor holds."""
    chosen = [_step(side, channels) for side in (k, v)]
    tile, stages = min(tile for tile, _ in chosen), min(stages for _, stages in chosen)
    if columns > 8:
        tile //= 2
    if not asm and any(isinstance(side, Rotated) or (isinstance(side, Codebook) and side.planes.bits == 4) for side in (k, v)):
        tile //= 2  # selects, and rotated keys, hold more at a time than assembly
    while tile > capacity:
        tile //= 2
    # cosines in array operations: one warp does not hold the smallest step of 256 channels
    warps = 2 if isinstance(k, Polar) and channels == 256 else 1
    tile = max(tile, SPAN)
    resident = min(WARPS // warps, SHARED_BYTES // shared_bytes(k, v, channels, tile, stages))
    return Tuning(tile, warps, stages, resident=max(1, resident))


def shared_bytes(k: Side, v: Side, channels: int, tile: int, stages: int) -> int:
    """What a program takes of a multiprocessor's shared memory, estimated: within an eighth of what most compiled kernels ask for. Those
    with tables ask for more, but registers limit them; 2-bit keys in groups of 64 and 128 tokens for twice as much, 25 and 49 KB. A tile of
    both sides for each stage but the one in registers, one more of exact values, which dots read where they lie, and what rearranging
    takes."""
    keys, values = (row_bytes(side, channels) for side in (k, v))
    return (stages - 1) * tile * (keys + values) + (tile * values if isinstance(v, Dense) else 0) + OTHER_SHARED_BYTES


def row_bytes(side: Side, channels: int) -> int:
    """Bytes that a token takes of a tile; the few of a table's statistics, and of polar groups', are not counted."""
    if isinstance(side, Rotated):
        return row_bytes(side.inner, channels)
    if isinstance(side, Dense):
        return 2 * channels
    assert isinstance(side, Grouped | Codebook | Polar), side
    words = side.planes.bits * side.planes.channels // 8
    return words + (2 if side.centre is None else 1) * 2 * channels // side.group if isinstance(side, Grouped) else words


def _step(side: Side, channels: int) -> tuple[int, int]:
    if isinstance(side, Rotated):
        tile, stages = _step(side.inner, channels)
        return (tile // 2 if isinstance(side.inner, Codebook) and side.inner.planes.bits == 4 else min(tile, 8192 // channels)), stages
    if isinstance(side, Grouped):
        tile, stages = _STEPS.get((channels, side.planes.bits), ((128, 3), (128, 3)))[side.centre is None]
        # two groups of 64 with zeros spill in the loop, where one does not, nor do four of 32
        halved = side.axis == "tokens" and side.group == 64 and side.centre is None
        return (min(tile, 64) if halved else tile), stages
    if isinstance(side, Polar):
        return 4096 // channels, 3
    return 8192 // channels, 2 if isinstance(side, Codebook) and side.planes.bits == 4 else 3
