"""Runs of channels of several widths, read by kernels: against softmax in float64 over the rows
that the codes stand for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_jax.arrays.packing import pack, run_layout
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.codecs import kernel_readers
from pallas_kernels.decode_attention.kernel import decode_attention
from pallas_kernels.launch import Launch
from pallas_kernels.readers.base import Reader
from tests.exhaustive import some
from tests.pallas_kernels.emulator import Emulated
from tests.pallas_kernels.kernel_cases import row_errors
from tests.pallas_kernels.lowering import lower_for_cuda

BATCH, HEADS, GROUP, SINK, FACTOR = 3, 2, 4, 5, 1.25
CASES = (  # head dim, widths of keys and of values in chunks of equal size, capacity
    "64 8531 7642 256",
    "64 2100 4400 288",
    # chunks of two runs that store nothing alike (6 and 3 bits) or a part of it (5 and 4)
    "64 54332110 65544322 256",
    "64 20000000 32111000 288",  # a half that is stored beside one that is not, on both sides
    "128 63322110 55432100 608",
    "128 5433222111100000 6543332222110000 256",
)
INTERPRETED = Launch(interpret=True)


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a cache: what a kernel reads, the rows in float64 that it stands for, and the
    frequencies of keys."""

    reader: Reader
    arrays: list[np.ndarray]
    rows: np.ndarray
    frequencies: np.ndarray | None

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return keys rotated to positions, or values."""
        if self.frequencies is None:
            return self.rows
        angles = positions[:, None] * self.frequencies.astype(np.float64)
        (first, second), cos, sin = np.split(self.rows, 2, axis=-1), np.cos(angles), np.sin(angles)
        return FACTOR * np.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        )


def made(head_dim: int, widths: str, capacity: int, keys: bool, seed: int) -> Side:
    rng = np.random.default_rng(seed)
    chunk = head_dim // len(widths)
    runs = [
        (int(width), chunk * len(list(same)))
        for width, same in itertools.groupby(widths)
        if width != "0"
    ]
    layouts = [run_layout(width, channels, 32) for width, channels in runs]
    reader = kernel_readers.runs(layouts, head_dim, pre_rope=keys)
    assert isinstance(reader, Reader), reader
    arrays, levels = [], []
    for (width, channels), layout in zip(runs, layouts, strict=True):
        codes = rng.integers(0, 1 << width, (BATCH, HEADS, capacity, channels))
        arrays += [np.asarray(words) for words in pack(jnp.asarray(codes, jnp.uint16), layout)]
        levels.append((codes + 0.5 - 2 ** (width - 1)) * STEPS[width])
    scale = rng.integers(-8, 9, (BATCH, HEADS, capacity)).astype(np.int8)
    rows = np.concatenate(levels, axis=-1) * 2.0 ** (scale[..., None] / 8)
    arrays += [scale, np.asarray(STEPS[1:], np.float32)]
    mean = rng.normal(size=(HEADS, head_dim)).astype(np.float32)
    if not keys:
        synthesis = (rng.normal(size=(HEADS, head_dim, head_dim)) / np.sqrt(head_dim)).astype(
            np.float32
        )
        rows = (
            np.einsum("bktc,kce->bkte", rows, synthesis[:, : rows.shape[-1]]) + mean[None, :, None]
        )
        return Side(reader, [*arrays, synthesis, mean], rows, None)
    pairs = np.stack([rng.permutation(head_dim // 2) for _ in range(HEADS)])
    place = np.concatenate([2 * pairs, 2 * pairs + 1], axis=-1).astype(np.int32)
    deviation = np.tile(rng.uniform(0.2, 1, (HEADS, head_dim // 2)), 2).astype(np.float32)
    rows = np.pad(rows, [(0, 0)] * 3 + [(0, head_dim - rows.shape[-1])])
    rows = (
        np.take_along_axis(rows, place[None, :, None], axis=-1) * deviation[None, :, None]
        + mean[None, :, None]
    )
    frequencies = (100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    arrays += [place, deviation, mean, frequencies, np.float32(FACTOR)]
    return Side(reader.placed(SINK, 32, 1), arrays, rows, frequencies)


def spoiled(side: Side, limits: Sequence[int], scale: int) -> list[np.ndarray]:
    """Return the arrays with ones in the words, and this scale, of all that no token below a row's
    limit reads."""
    capacity = side.rows.shape[2]
    found = []
    for array in side.arrays:
        array = np.array(array)
        if array.ndim > 2 and array.shape[0] == BATCH and array.dtype.itemsize < 4:
            for row, limit in zip(array, limits, strict=True):
                per_row = capacity // array.shape[2]
                row[:, (limit if per_row == 1 else -(-limit // 32) * 32) // per_row :] = (
                    -1 if per_row > 1 else scale
                )
        found.append(array)
    return found


def attended(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, limits: Sequence[int]
) -> np.ndarray:
    scores = np.einsum("bkgh,bkth->bkgt", q, keys) / np.sqrt(q.shape[-1])
    scores = np.where(
        np.arange(keys.shape[2]) < np.asarray(limits)[:, None, None, None], scores, -np.inf
    )
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bkgt,bkth->bkgh", weights / weights.sum(axis=-1, keepdims=True), values)


def run(
    q: np.ndarray,
    sides: Sequence[Side],
    arrays: Sequence[list[np.ndarray]],
    limits: Sequence[int],
    launch: Launch,
) -> np.ndarray:
    keys, values = (
        (side.reader, [jnp.asarray(a) for a in own])
        for side, own in zip(sides, arrays, strict=True)
    )
    capacity = sides[0].rows.shape[2]
    part = decode_attention(
        jnp.asarray(q, jnp.float32),
        keys,
        values,
        jnp.asarray(limits),
        capacity=capacity,
        launch=launch,
    )
    return np.asarray(part.o / part.l)


def case(shape: str) -> tuple[np.ndarray, list[Side], tuple[int, ...], np.ndarray]:
    """Return queries, both sides, limits of rows (the last one is full) and what attention
    gives."""
    channels, k_widths, v_widths, tokens = shape.split()
    head_dim, capacity = int(channels), int(tokens)
    sides = [
        made(head_dim, widths, capacity, keys, seed)
        for seed, (widths, keys) in enumerate(((k_widths, True), (v_widths, False)))
    ]
    q = np.random.default_rng(9).normal(size=(BATCH, HEADS, GROUP, head_dim))
    limits = 1, capacity - 37, capacity
    keys, values = (side.at(SINK + np.arange(capacity)) for side in sides)
    return q, sides, limits, attended(q, keys, values, limits)


@pytest.mark.parametrize("shape", some(CASES, CASES[:4]))
def test_runs_are_read_as_what_they_stand_for(shape):
    q, sides, limits, wanted = case(shape)
    found = run(q, sides, [side.arrays for side in sides], limits, INTERPRETED)
    assert row_errors(found, wanted).max() < 4e-3
    assert row_errors(np.roll(found, 1, axis=0), wanted).max() > 0.1, (
        "another row's output would pass"
    )
    keys, values = (side.at(SINK + np.arange(limits[-1])) for side in sides)
    assert row_errors(attended(q, keys[:, :, ::-1], values, limits), wanted).max() > 0.1, (
        "keys of other tokens would pass"
    )
    assert row_errors(attended(q, sides[0].rows, values, limits), wanted).max() > 0.1, (
        "keys that are not rotated would pass"
    )


@pytest.mark.parametrize(("shape", "scale"), [(CASES[1], 127), (CASES[1], -128), (CASES[3], 127)])
def test_what_lies_in_unused_capacity_is_never_used(shape: str, scale: int):
    q, sides, limits, _ = case(shape)
    wanted = run(q, sides, [side.arrays for side in sides], limits, INTERPRETED)
    arrays = [spoiled(side, limits, scale) for side in sides]
    assert all(
        (a != b).any()
        for own, side in zip(arrays, sides, strict=True)
        for a, b in zip(own[:2], side.arrays[:2], strict=True)
    )
    np.testing.assert_array_equal(run(q, sides, arrays, limits, INTERPRETED), wanted)


@pytest.mark.usefixtures("assembler")
@pytest.mark.parametrize("shape", some(CASES[:4], (CASES[0], CASES[2])))
def test_assembly_computes_what_array_operations_do(shape):
    q, sides, limits, wanted = case(shape)
    assert (
        row_errors(run(q, sides, [side.arrays for side in sides], limits, Emulated()), wanted).max()
        < 4e-3
    )


@pytest.mark.parametrize("shape", [CASES[0], CASES[2]])
@pytest.mark.parametrize("arithmetic", ["jnp", "asm"])
def test_the_kernel_lowers_for_cuda(shape: str, arithmetic: Any):
    q, sides, limits, _ = case(shape)
    capacity = limits[-1]
    keys, values = (
        [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in side.arrays] for side in sides
    )

    def attend(q: Any, keys: Any, values: Any, limits: Any) -> Any:
        k, v = (side.reader for side in sides)
        return decode_attention(
            q, (k, keys), (v, values), limits, capacity=capacity, launch=Launch(arithmetic)
        )

    text = lower_for_cuda(attend, jnp.asarray(q, jnp.float32), keys, values, jnp.asarray(limits))
    assert "decode_attention" in text


@pytest.mark.parametrize(
    ("widths", "head_dim", "block", "reason"),
    [
        (
            "4333222222111100",
            64,
            32,
            "a run of 4 channels of 4 bits; kernels read runs of a multiple of 8 channels",
        ),
        ("4331", 64, 16, "blocks that are not a multiple of 32"),
        ("43322110", 80, 32, "head_dim 80"),
        ("43322110", 256, 32, "runs of channels at head_dim 256; kernels read them at 64 and 128"),
    ],
)
def test_what_kernels_do_not_read_has_a_reason(widths: str, head_dim: int, block: int, reason: str):
    chunk = head_dim // len(widths)
    layouts = [
        run_layout(int(w), chunk * len(list(same)), block)
        for w, same in itertools.groupby(widths)
        if w != "0"
    ]
    for keys in (True, False):
        assert reason in str(kernel_readers.runs(layouts, head_dim, pre_rope=keys))
