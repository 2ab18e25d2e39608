"""The layouts of bodies that the C++ kernel is tested with, and their random inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from cpu_kernels import attention as native
from tests.cpu_kernels.random_bodies import BodyCase


def tokens(bits: int, channels: int, group: int = 32, block: int = 32, **options) -> BodyCase:
    """Return a body in which `group` tokens share a scale."""
    return BodyCase(bits, channels, block, "token groups", group, **options)


def channels(bits: int, channels: int, group: int = 32, block: int = 32, **options) -> BodyCase:
    """Return a body in which `group` channels of a token share a scale."""
    return BodyCase(bits, channels, block, "channel groups", group, **options)


def table(bits: int, channels: int, block: int = 32, **options) -> BodyCase:
    """Return a body of entries of a table, with fixed scales of channels."""
    options = {"scale_dtype": "float32", "table": True} | options
    return BodyCase(bits, channels, block, "channels", 1, **options)


def rows(channels: int, dtype: str) -> BodyCase:
    return BodyCase(0, channels, 1, "channels", 1, scale_dtype=dtype, form="rows")


def polar(bits: int, angle_bits: int, channels: int, *, group: int, **options) -> BodyCase:
    return tokens(bits, channels, group, form="polar", angle_bits=angle_bits, **options)


def runs(
    channels: int, block: int, rotated: bool = False, synthesis: bool = False, **widths: int
) -> BodyCase:
    """Return a body in runs. widths: the channels with one, two, ... bits."""
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    stored = tuple(widths.get(name, 0) for name in names)
    options = {"rotated": rotated, "synthesis": synthesis, "run_channels": stored}
    return BodyCase(0, channels, block, "channels", 1, form="runs", **options)


CASES = {
    "2 bits, 64": (tokens(2, 64), channels(2, 64)),
    "2 bits, 128": (tokens(2, 128), channels(2, 128)),
    "4 bits, 128": (tokens(4, 128, 64, 128), channels(4, 128, 64, 128)),
    "3 bits, 128": (channels(3, 128, centre=3), tokens(3, 128, centre=3)),
    "3 bits, 64": (channels(3, 64), tokens(3, 64)),
    "5 and 9 bits": (channels(5, 64, 16, centre=15), tokens(9, 64, 16, centre=255)),
    "8 bits": (tokens(8, 96, scale_dtype="bfloat16"), channels(8, 96, 8, scale_dtype="float32")),
    "1 and 6 bits": (tokens(1, 64, 4, 16), channels(6, 64, 4, 16)),
    "head dim 80": (tokens(4, 80), channels(2, 80, 16)),
    "one group of 72": (channels(4, 72, 72), channels(3, 72, 72)),
    "one group before RoPE": (channels(4, 72, 72, rotated=True), channels(2, 72, 24)),
    "head dim 8": (tokens(2, 8, 8, 8), channels(3, 8, 8, 8)),
    "blocks of 12": (tokens(4, 32, 12, 12), channels(2, 32, 2, 12)),
    "groups of 96": (tokens(3, 256, 96, 96), tokens(4, 256, 48, 96)),
    "heads together": (channels(4, 64, 64, 8, heads=2), channels(3, 64, 64, 8, heads=2)),
    "tables": (table(4, 64), channels(3, 64, table=True)),
    "tables, too": (channels(2, 64, 8, table=True), table(2, 64)),
    "dense fp32": (rows(64, "float32"), rows(64, "float32")),
    "dense, head dim 80": (rows(80, "bfloat16"), rows(80, "float32")),
    "dense, 16 bits": (rows(128, "bfloat16"), rows(128, "float16")),
    "before RoPE": (tokens(3, 64, 16, rotated=True), channels(2, 64)),
    "before RoPE, head dim 80": (channels(4, 80, 8, 12, rotated=True), channels(4, 80, 16, 12)),
    "before RoPE, tables": (
        table(4, 64, rotated=True, pool=32),
        channels(3, 64, 64, heads=2, table=True, pool=16, residual_dtype="float32"),
    ),
    "outliers": (channels(4, 32, 32, 12, table=True, pool=12), table(2, 32, 12, pool=4)),
    "polar": (polar(8, 4, 64, group=32), rows(64, "float32")),
    "polar, 6 bits": (polar(6, 4, 128, group=16), channels(4, 128)),
    "polar, 12 bits": (
        polar(12, 6, 16, group=8, root=True, scale_dtype="float32"),
        channels(2, 16, 16),
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
    "runs of keys alone": (runs(32, 48, True, two=32), channels(2, 32, 32, 48)),
    "runs of mixed keys": (
        runs(64, 32, True, True, five=8, four=8, three=8, two=16, one=8),
        runs(64, 32, six=8, three=24, two=8, one=16),
    ),
    "runs of mixed keys, head dim 80": (
        runs(80, 16, True, True, three=10, one=20),
        runs(80, 16, two=6),
    ),
    "runs of mixed keys, head dim 12": (
        runs(12, 48, True, True, six=4, two=6),
        channels(2, 12, 12, 48),
    ),
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
