"""Tile sizes, stages and programs of the decode-attention kernel. They change its speed, and its
result only by rounding: sums are taken in another order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.decode_attention.schedule import MIN_TILES
from pallas_kernels.readers.base import Reader


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Parameters that change the speed, and results only by rounding. The number of programs is
    `cores` times `resident` (docs/kernels.md).

    Args:
        tile: tokens of a loop step.
        warps: Triton's.
        stages: Triton's.
        cores: multiprocessors. None takes the number that the device has.
        resident: programs that run on one multiprocessor at a time.
    """

    tile: int = 128
    warps: int = 1
    stages: int = 3
    cores: int | None = None
    resident: int = 8

    @property
    def running(self) -> int:
        """Return how many programs run at a time."""
        return (target_cores() if self.cores is None else self.cores) * self.resident

    def programs(self, units: int, capacity: int) -> int:
        """Return the number of programs that share the live tiles of `units` rows times KV heads.

        That is as many as run at a time, so that none waits for another, or fewer if there are less
        than MIN_TILES tiles for each.
        """
        return max(1, min(self.running, pl.cdiv(units * pl.cdiv(capacity, self.tile), MIN_TILES)))


def target_device() -> Any:
    """Return the device that is compiled for: that of the mesh in use, or this process's first."""
    of_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if of_mesh is None:
        return jax.devices()[0]
    # a mesh's device has a kind, but no compute capability, even if the mesh is of real ones
    here = jax.devices()[0]
    return here if of_mesh.device_kind == here.device_kind else of_mesh


def target_capability() -> str:
    """Return the compute capability of the GPU that is compiled for, or of an H200 if it is not a
    GPU or does not say."""
    return str(getattr(target_device(), "compute_capability", None) or H200_CAPABILITY)


def target_cores() -> int:
    """Return the number of multiprocessors of the GPU that is compiled for, or of an H200 if it is
    not a GPU or does not say."""
    device = target_device()
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None) or H200_CORES


def shared_bytes_of(capability: str) -> int:
    """Return the shared memory of a multiprocessor, the smallest of all if the architecture is
    unknown."""
    return SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))


H200_CAPABILITY, H200_CORES = "9.0", 132
WARPS = (
    8  # The most that a multiprocessor's 65536 registers hold, for kernels that use 255 registers.
)
# Per multiprocessor, by compute capability. Source: CUDA's programming guide, table of technical
# specifications.
SHARED_BYTES = {
    **{"8.0": 167936, "8.6": 102400, "8.7": 167936, "8.9": 102400},
    **{"9.0": 233472, "10.0": 233472, "10.3": 233472, "12.0": 102400, "12.1": 102400},
}
OTHER_SHARED_BYTES = 3072  # of each program: for rearranging, and what the system keeps


def tuning_for(k: Reader, v: Reader, columns: int, capacity: int, asm: bool) -> Tuning:
    """Return the default tuning for these readers: a tile no larger than the capacity and than
    their `longest_tile`, and the number of programs that fit on a multiprocessor.
    """
    steps, longest = (k.step, v.step), (k.longest_tile, v.longest_tile)
    tile, warps = min(s.tile for s in steps), max(s.warps for s in steps)
    stages = min(s.stages for s in steps)
    if columns > 8:
        tile //= 2
    if not asm and any(s.crowded for s in steps):
        tile //= 2
    while tile > capacity:
        tile //= 2
    tile = min([tile, *(tokens for tokens in longest if tokens is not None)])
    tile = max(tile, k.min_tile, v.min_tile)
    shared = shared_bytes_of(target_capability())
    resident = min(WARPS // warps, shared // shared_bytes(k, v, tile, stages))
    return Tuning(tile, warps, stages, resident=max(1, resident))


def shared_bytes(k: Reader, v: Reader, tile: int, stages: int) -> int:
    """Estimate the shared memory that a program takes, within an eighth of what most compiled
    kernels ask for.

    That is a tile of keys and of values for each stage except the one in registers, one more tile
    of full-precision values, which dots read in place, and room for rearranging. Kernels with
    tables ask for more, but are limited by registers. 2-bit keys in groups of 64 and 128 tokens ask
    for twice as much, 25 and 49 KB.
    """
    in_place = 0 if v.packed else tile * v.row_bytes
    return (stages - 1) * tile * (k.row_bytes + v.row_bytes) + in_place + OTHER_SHARED_BYTES
