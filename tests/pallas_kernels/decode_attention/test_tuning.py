"""The number of programs follows from a kernel's shape and its device, and changes only speed."""

import types

import jax
import pytest

from kvq_jax.codecs.kernel_readers import polar
from pallas_kernels.decode_attention.tuning import (
    H200_CORES,
    Tuning,
    shared_bytes,
    target_capability,
    target_cores,
    tuning_for,
)
from pallas_kernels.readers.base import Reader
from pallas_kernels.readers.rotary import RotatedReader
from pallas_kernels.tiles.layout import plane_layout
from tests.pallas_kernels.grouped_sides import format_of, reader_of


def polar_keys(head_dim: int) -> Reader:
    reader = polar(plane_layout(8, head_dim // 2, 128), 4, 128, "float16", grouped_angles=True)
    assert isinstance(reader, Reader)
    return reader


def pair(bits: int, scheme: str, head_dim: int = 128) -> tuple[Reader, Reader]:
    k, v = (
        reader_of(format_of(bits, scheme, axis, head_dim), head_dim)
        for axis in ("channels", "tokens")
    )
    return k, v


EXACT = reader_of(None, 128)
# Programs on a multiprocessor of an H200, and the KB that each asks for. Source:
# benchmarks/results, table of instructions.
COUNTED = [
    (pair(1, "sym"), 8, 20.5),
    (pair(2, "asym"), 8, 24.5),
    (pair(3, "sym"), 5, 38.5),
    (pair(8, "asym"), 8, 20.2),
    ((EXACT, EXACT), 2, 82.0),
    ((polar_keys(128), EXACT), 7, 30.0),
    ((polar_keys(256), reader_of(None, 256)), 3, 62.5),
]


@pytest.mark.parametrize(("readers", "programs", "kilobytes"), COUNTED)
def test_as_many_programs_run_as_their_tiles_leave_room_for(readers, programs, kilobytes):
    tuning = tuning_for(*readers, 8, 16384, True)
    assert tuning.resident == programs
    estimate = shared_bytes(*readers, tuning.tile, tuning.stages)
    assert estimate == pytest.approx(kilobytes * 1024, rel=0.13)


@pytest.mark.parametrize(("size", "tile"), [(32, 128), (64, 64), (128, 128)])
def test_no_step_holds_two_groups_of_64_tokens(size, tile):
    k, v = (
        reader_of(format_of(2, "asym", "tokens", 128, size), 128),
        reader_of(format_of(2, "asym", "channels", 128), 128),
    )
    assert tuning_for(k, v, 8, 16384, True).tile == tile


@pytest.mark.parametrize(("block", "shards", "tile"), [(96, 1, 128), (96, 2, 32), (64, 2, 128)])
def test_no_tile_is_longer_than_its_readers_take(block, shards, tile):
    """A tile of keys before RoPE lies in one block, or is whole blocks, if shards hold every n-th
    one.
    """
    k, v = pair(4, "asym")
    turned = RotatedReader(k).placed(0, block, shards)
    assert tuning_for(turned, v, 8, 16384, True).tile == min(tile, turned.step.tile)
    assert tuning_for(v, turned, 8, 16384, True).tile == min(tile, turned.step.tile)


def test_cores_are_those_of_the_device(monkeypatch):
    for cores in (108, 132):
        monkeypatch.setattr(
            jax, "devices", lambda cores=cores: [types.SimpleNamespace(core_count=cores)]
        )
        assert target_cores() == cores
        assert Tuning().programs(128, 1 << 20) == Tuning(cores=cores).programs(128, 1 << 20)
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace()])
    assert target_cores() == H200_CORES


def test_the_target_is_the_device_of_the_mesh_in_use(monkeypatch):
    """Under a mesh of this process's GPUs, JAX names their kind, but no compute capability."""
    a100 = types.SimpleNamespace(
        device_kind="NVIDIA A100", compute_capability="8.0", core_count=108
    )
    monkeypatch.setattr(jax, "devices", lambda: [a100])
    found = {}
    for kind, cores in (("NVIDIA A100", 108), ("NVIDIA B200", 148), ("NVIDIA H200", None)):
        device = jax.sharding.AbstractDevice(kind, cores, "gpu")
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            found[kind] = target_capability(), target_cores()
    assert found["NVIDIA A100"] == ("8.0", 108)
    assert found["NVIDIA H200"] == ("9.0", H200_CORES)
    assert found["NVIDIA B200"][1] == 148


def test_programs_share_the_memory_that_their_device_has(monkeypatch):
    """Rows in full precision ask for 82 KB. Two such programs fit an H200, one an A100 or an RTX
    4090, and one is always started.
    """
    resident = {}
    for capability in ("9.0", "8.0", "8.9", "10.3", "99.0"):
        monkeypatch.setattr(
            jax,
            "devices",
            lambda capability=capability: [types.SimpleNamespace(compute_capability=capability)],
        )
        resident[capability] = (
            tuning_for(EXACT, EXACT, 8, 16384, True).resident,
            tuning_for(*pair(3, "sym"), 8, 16384, True).resident,
        )
    assert resident.pop("10.3") == resident["9.0"]
    assert resident == {"9.0": (2, 5), "8.0": (1, 4), "8.9": (1, 2), "99.0": (1, 2)}
