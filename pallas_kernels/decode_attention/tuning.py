"""Tile sizes, stages and programs of the decode-attention kernel: they change its speed, never its
result."""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.schedule import LEAST
from pallas_kernels.readers.base import Reader


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Parameters that change only the speed.

    tile: tokens of a loop step; warps and stages: Triton's; cores: multiprocessors, None for as
    many as the device has; resident: programs that run on one of them at a time. The number of
    programs follows from the last two (docs/kernels.md).
    """

    tile: int = 128
    warps: int = 1
    stages: int = 3
    cores: int | None = None
    resident: int = 8

    @property
    def running(self) -> int:
        """Return how many programs run at a time."""
        return (device_cores() if self.cores is None else self.cores) * self.resident

    def programs(self, units: int, capacity: int) -> int:
        """Return the programs that share the live tiles of so many rows times KV heads: all that
        run at a time, none of which waits for another; fewer where there is less than LEAST tiles
        for each."""
        return max(1, min(self.running, pl.cdiv(units * pl.cdiv(capacity, self.tile), LEAST)))

    def splits(self, programs: int, capacity: int) -> int:
        """Return the number of splits of the token axis, at least two tiles each, that is fastest
        for `programs` rows times KV heads.

        Programs run in rounds of as many as the device holds at a time, and each reads its tiles
        after as long as one takes to arrive. A few programs more than one round would keep the
        device busy for as long as two.
        """
        running = self.running
        tiles = capacity // self.tile
        most = max(1, min(tiles // 2, 4 * pl.cdiv(running, programs)))
        return min(
            range(1, most + 1),
            key=lambda splits: pl.cdiv(programs * splits, running) * (pl.cdiv(tiles, splits) + 1),
        )


def device_cores() -> int:
    """Count the multiprocessors of the device that this process runs on; those of an H200 where it
    is not a GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_CORES


def device_shared_bytes() -> int:
    """Return the shared memory of a multiprocessor of the device that this process runs on: an
    H200's where it is not a GPU, and the least that any has where its architecture is unknown."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return (
        SHARED_BYTES["9.0"]
        if capability is None
        else SHARED_BYTES.get(str(capability), min(SHARED_BYTES.values()))
    )


TUNING = Tuning()
H200_CORES = 132
WARPS = (
    8  # the most that a multiprocessor's 65536 registers hold, for kernels that use 255 registers
)
# of a multiprocessor, by compute capability: CUDA's programming guide, table of technical
# specifications
SHARED_BYTES = {
    **{"8.0": 167936, "8.6": 102400, "8.7": 167936, "8.9": 102400},
    **{"9.0": 233472, "10.0": 233472, "12.0": 102400},
}
OTHER_SHARED_BYTES = 3072  # of each program: for rearranging, and what the system keeps


def tuning_for(k: Reader, v: Reader, columns: int, capacity: int, asm: bool) -> Tuning:
    """Return the usual step for these readers, no larger than the capacity, and the number of such
    programs on a multiprocessor."""
    steps = k.step, v.step
    tile, stages, warps = (
        min(s.tile for s in steps),
        min(s.stages for s in steps),
        max(s.warps for s in steps),
    )
    if columns > 8:
        tile //= 2
    if not asm and any(s.crowded for s in steps):
        tile //= 2
    while tile > capacity:
        tile //= 2
    tile = max(tile, k.least_tile, v.least_tile)
    resident = min(WARPS // warps, device_shared_bytes() // shared_bytes(k, v, tile, stages))
    return Tuning(tile, warps, stages, resident=max(1, resident))


def shared_bytes(k: Reader, v: Reader, tile: int, stages: int) -> int:
    """Estimate what a program takes of a multiprocessor's shared memory, within an eighth of what
    most compiled kernels ask for.

    A tile of keys and of values for each stage but the one in registers, one more of full-precision
    values, which dots read where they lie, and what rearranging takes. Kernels with tables ask for
    more, but registers limit them; 2-bit keys in groups of 64 and 128 tokens for twice as much, 25
    and 49 KB.
    """
    in_place = 0 if v.packed else tile * v.row_bytes
    return (stages - 1) * tile * (k.row_bytes + v.row_bytes) + in_place + OTHER_SHARED_BYTES
