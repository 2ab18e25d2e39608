"""Sides in runs of channels of several widths."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays.packing import run_layout
from kvq_jax.arrays.reverse_water_filling import STEPS
from kvq_jax.codecs import kernel_readers
from pallas_kernels.readers.base import Reader
from pallas_kernels.tiles.layout import PlaneLayout
from tests.float64 import rotated
from tests.pallas_kernels.codebook_sides import FACTOR, SINK
from tests.pallas_kernels.compiled import pack
from tests.pallas_kernels.harness import Shape, StoredSide


def run_layouts(widths: str, head_dim: int, block: int = 32) -> list[PlaneLayout]:
    """Return the layouts of the stored runs. widths: of chunks of equal size, 0 for channels that
    are not stored.
    """
    chunk = head_dim // len(widths)
    runs = [(int(width), len(list(same))) for width, same in itertools.groupby(widths)]
    return [run_layout(width, chunk * count, block) for width, count in runs if width]


def run_side(widths: str, *, keys: bool, eigen: bool = False) -> Callable[[Shape, int], StoredSide]:
    """Return what makes random keys, or values, in runs. eigen: keys in an eigenbasis."""

    def side(shape: Shape, seed: int) -> StoredSide:
        batch, heads, tokens, head_dim = shape
        rng, layouts = np.random.default_rng(seed), run_layouts(widths, head_dim)
        reader = kernel_readers.runs(layouts, head_dim, pre_rope=keys, synthesis=eigen)
        assert isinstance(reader, Reader), reader
        arrays, levels = [], []
        for layout in layouts:
            codes = rng.integers(0, 1 << layout.bits, (*shape[:3], layout.channels))
            arrays += map(np.asarray, pack(jnp.asarray(codes, jnp.uint16), layout))
            levels.append((codes + 0.5 - 2 ** (layout.bits - 1)) * STEPS[layout.bits])
        scale = rng.integers(-8, 9, shape[:3]).astype(np.int8)
        rows = np.concatenate(levels, axis=-1) * 2.0 ** (scale[..., None] / 8)
        arrays += [scale, np.asarray(STEPS[1:], np.float32)]
        mean = rng.normal(size=(heads, head_dim)).astype(np.float32)
        if eigen or not keys:
            basis = rng.normal(size=(heads, head_dim, head_dim)) / np.sqrt(head_dim)
            synthesis = basis.astype(np.float32)
            arrays += [synthesis, mean]
            rows = rows @ synthesis[None, :, : rows.shape[-1]] + mean[None, :, None]
        else:
            pairs = np.stack([rng.permutation(head_dim // 2) for _ in range(heads)])
            place = np.concatenate([2 * pairs, 2 * pairs + 1], axis=-1).astype(np.int32)
            deviation = np.tile(rng.uniform(0.2, 1, (heads, head_dim // 2)), 2).astype(np.float32)
            rows = np.pad(rows, [(0, 0)] * 3 + [(0, head_dim - rows.shape[-1])])
            rows = np.take_along_axis(rows, place[None, :, None], axis=-1)
            rows = rows * deviation[None, :, None] + mean[None, :, None]
            arrays += [place, deviation, mean]
        if not keys:
            spoiled = functools.partial(_spoiled, arrays, shape)
            return StoredSide(reader, arrays, rows, dict, spoiled)
        frequencies = (100.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
        arrays += [frequencies, np.float32(FACTOR)]
        angles = (SINK + np.arange(tokens))[:, None] * frequencies.astype(np.float64)
        turned = rotated(rows, angles, FACTOR)
        wrong = {"without a rotation": rows, "of other tokens": turned[:, :, ::-1]}
        spoiled = functools.partial(_spoiled, arrays, shape)
        placed = reader.placed(SINK, 32, 1)
        return StoredSide(placed, arrays, turned, lambda: wrong, spoiled)

    return side


def _spoiled(
    arrays: Sequence[np.ndarray], shape: Shape, limits: Sequence[int], scale: int
) -> list[np.ndarray]:
    """Overwrite words by ones, and scales of tokens by `scale`."""
    batch, _, capacity, _ = shape
    spoiled = []
    for array in arrays:
        array = np.array(array)
        if array.ndim > 2 and array.shape[0] == batch and array.dtype.itemsize < 4:
            per_row = capacity // array.shape[2]
            for row, limit in zip(array, limits, strict=True):
                if per_row == 1:
                    row[:, limit:] = scale
                else:
                    row[:, -(-limit // 32) * 32 // per_row :] = -1
        spoiled.append(array)
    return spoiled
