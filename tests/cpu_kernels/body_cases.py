"""The layouts of bodies that the C++ kernel is tested with, and their random inputs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from cpu_kernels import attention as native
from tests.cpu_kernels.random_bodies import BodyCase


def rows(channels: int, dtype: str) -> BodyCase:
    return BodyCase(0, channels, 1, "channels", 1, scale_dtype=dtype, form="rows")


def polar(bits: int, angle_bits: int, channels: int, *, group: int, **options) -> BodyCase:
    return BodyCase(
        bits, channels, 32, "token groups", group, form="polar", angle_bits=angle_bits, **options
    )


def runs(channels: int, block: int, rotated: bool = False, **widths: int) -> BodyCase:
    """Return a body in runs. widths: the channels with one, two, ... bits."""
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    stored = tuple(widths.get(name, 0) for name in names)
    return BodyCase(
        0, channels, block, "channels", 1, form="runs", rotated=rotated, run_channels=stored
    )


CASES = {
    "2 bits, 64": (
        BodyCase(2, 64, 32, "token groups", 32),
        BodyCase(2, 64, 32, "channel groups", 32),
    ),
    "2 bits, 128": (
        BodyCase(2, 128, 32, "token groups", 32),
        BodyCase(2, 128, 32, "channel groups", 32),
    ),
    "4 bits, 128": (
        BodyCase(4, 128, 128, "token groups", 64),
        BodyCase(4, 128, 128, "channel groups", 64),
    ),
    "3 bits, 128": (
        BodyCase(3, 128, 32, "channel groups", 32, centre=3),
        BodyCase(3, 128, 32, "token groups", 32, centre=3),
    ),
    "3 bits, 64": (
        BodyCase(3, 64, 32, "channel groups", 32),
        BodyCase(3, 64, 32, "token groups", 32),
    ),
    "5 and 9 bits": (
        BodyCase(5, 64, 32, "channel groups", 16, centre=15),
        BodyCase(9, 64, 32, "token groups", 16, centre=255),
    ),
    "8 bits": (
        BodyCase(8, 96, 32, "token groups", 32, scale_dtype="bfloat16"),
        BodyCase(8, 96, 32, "channel groups", 8, scale_dtype="float32"),
    ),
    "1 and 6 bits": (
        BodyCase(1, 64, 16, "token groups", 4),
        BodyCase(6, 64, 16, "channel groups", 4),
    ),
    "head dim 80": (
        BodyCase(4, 80, 32, "token groups", 32),
        BodyCase(2, 80, 32, "channel groups", 16),
    ),
    "head dim 8": (BodyCase(2, 8, 8, "token groups", 8), BodyCase(3, 8, 8, "channel groups", 8)),
    "blocks of 12": (
        BodyCase(4, 32, 12, "token groups", 12),
        BodyCase(2, 32, 12, "channel groups", 2),
    ),
    "groups of 96": (
        BodyCase(3, 256, 96, "token groups", 96),
        BodyCase(4, 256, 96, "token groups", 48),
    ),
    "heads together": (
        BodyCase(4, 64, 8, "channel groups", 64, heads=2),
        BodyCase(3, 64, 8, "channel groups", 64, heads=2),
    ),
    "tables": (
        BodyCase(4, 64, 32, "channels", 1, scale_dtype="float32", table=True),
        BodyCase(3, 64, 32, "channel groups", 32, table=True),
    ),
    "tables, too": (
        BodyCase(2, 64, 32, "channel groups", 8, table=True),
        BodyCase(2, 64, 32, "channels", 1, scale_dtype="float32", table=True),
    ),
    "dense fp32": (rows(64, "float32"), rows(64, "float32")),
    "dense, head dim 80": (rows(80, "bfloat16"), rows(80, "float32")),
    "dense, 16 bits": (rows(128, "bfloat16"), rows(128, "float16")),
    "before RoPE": (
        BodyCase(3, 64, 32, "token groups", 16, rotated=True),
        BodyCase(2, 64, 32, "channel groups", 32),
    ),
    "before RoPE, head dim 80": (
        BodyCase(4, 80, 12, "channel groups", 8, rotated=True),
        BodyCase(4, 80, 12, "channel groups", 16),
    ),
    "before RoPE, tables": (
        BodyCase(
            4, 64, 32, "channels", 1, scale_dtype="float32", table=True, rotated=True, pool=32
        ),
        BodyCase(
            3, 64, 32, "channel groups", 64, heads=2, table=True, pool=16, residual_dtype="float32"
        ),
    ),
    "outliers": (
        BodyCase(4, 32, 12, "channel groups", 32, table=True, pool=12),
        BodyCase(2, 32, 12, "channels", 1, scale_dtype="float32", table=True, pool=4),
    ),
    "polar": (polar(8, 4, 64, group=32), rows(64, "float32")),
    "polar, 6 bits": (polar(6, 4, 128, group=16), BodyCase(4, 128, 32, "channel groups", 32)),
    "polar, 12 bits": (
        polar(12, 6, 16, group=8, root=True, scale_dtype="float32"),
        BodyCase(2, 16, 32, "channel groups", 16),
    ),
    "runs": (
        runs(64, 32, True, five=8, four=8, three=8, two=16, one=8),
        runs(64, 32, six=8, three=24, two=8, one=16),
    ),
    "runs of all widths": (
        runs(128, 32, True, eight=16, seven=8, six=24, five=8, four=16, three=8, two=24, one=24),
        runs(128, 32, eight=8, seven=24, six=8, five=16, four=8, three=24, two=8, one=8),
    ),
    "runs of some channels": (runs(80, 16, True, three=10, one=20), runs(80, 16, two=6)),
    "runs, blocks of 8": (runs(16, 8, True, eight=2, four=4, two=6), runs(16, 8, six=4, four=12)),
    "runs, blocks of 16": (
        runs(64, 16, True, seven=8, four=16, three=16, two=8, one=8),
        runs(64, 48, eight=16, five=8, three=24, two=16),
    ),
    "runs of keys alone": (runs(32, 48, True, two=32), BodyCase(2, 32, 48, "channel groups", 32)),
}
BATCH, HEADS = 3, 2


def inputs(case: str, group: int, tokens: int, capacity: int, seed: int = 0):
    """Return (q, stored keys, stored values, vectors of both)."""
    k, v = CASES[case]
    q = (
        np.random.default_rng(seed)
        .normal(size=(BATCH, HEADS, group * tokens, k.channels))
        .astype(np.float32)
    )
    (keys, k_hat), (values, v_hat) = (
        stored(side, capacity, seed + i) for i, side in enumerate((k, v), 1)
    )
    return q, list(keys), list(values), k_hat, v_hat


@functools.lru_cache(maxsize=2)  # tests of a case come side by side
def stored(side: BodyCase, capacity: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    return side.random(BATCH, HEADS, capacity, seed)


def decode_attention(q, keys, values, limits, *, capacity: int):
    """Call the kernel with NumPy arrays."""
    (k, k_arrays), (v, v_arrays) = keys, values
    arrays = jax.tree.map(jnp.asarray, (q, k_arrays, v_arrays, limits))
    return native.decode_attention(
        arrays[0], (k, arrays[1]), (v, arrays[2]), arrays[3], capacity=capacity
    )


def relative_errors(actual, expected) -> np.ndarray:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected, axis=-1) / np.maximum(
        np.linalg.norm(expected, axis=-1), 1e-30
    )
