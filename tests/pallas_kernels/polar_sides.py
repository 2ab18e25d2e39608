"""Keys in polar form."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvq_jax.arrays.polar_array import PolarFormat
from kvq_jax.codecs import kernel_readers
from pallas_kernels.readers.polar import PolarReader
from tests.pallas_kernels.compiled import dequantize_pairs, pack, stored_pairs, unpack
from tests.pallas_kernels.harness import Shape, StoredSide


def polar_reader(format: PolarFormat) -> PolarReader:
    reader = kernel_readers.polar(
        format.layout, format.angle_bits, format.group_size, "float16", grouped_angles=True
    )
    assert isinstance(reader, PolarReader), reader
    return dataclasses.replace(reader, scale_dtype=format.scale_dtype)


def random_pairs(shape: Shape, seed: int) -> np.ndarray:
    """Return rows whose pairs turn around a direction of their own, some around the whole circle.
    Some channels are large, and some groups of tokens.
    """
    batch, heads, tokens, head_dim = shape
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(shape) + 2 * rng.standard_normal((1, heads, 1, head_dim))
    rows[..., :: head_dim // 4] *= 3
    sizes = rng.uniform(0.2, 1.2, (batch, heads, tokens // 32, 1))
    return (rows * np.repeat(sizes, 32, axis=2)).astype(np.float32)


def polar_side(format: PolarFormat) -> Callable[[Shape, int], StoredSide]:
    """Return what makes random keys of a format."""

    def side(shape: Shape, seed: int) -> StoredSide:
        stored, arrays, meant = stored_pairs(jnp.asarray(random_pairs(shape, seed)), format)
        assert stored.radius_scale is not None
        rows = np.asarray(meant)

        def misread() -> dict[str, np.ndarray]:
            steps = jnp.roll(stored.radius_scale, 1, axis=2)
            shifted = dequantize_pairs(dataclasses.replace(stored, radius_scale=steps))
            return {
                "with the steps of the next group": np.asarray(shifted),
                "with sines in the place of cosines": np.roll(rows, shape[3] // 2, axis=3),
            }

        spoiled = functools.partial(_spoiled, format, arrays)
        return StoredSide(polar_reader(format), arrays, rows, misread, spoiled)

    return side


def _spoiled(
    format: PolarFormat, arrays: list[jax.Array], limits: Sequence[int], garbage: float
) -> list[jax.Array]:
    """Overwrite codes by ones, and floats by `garbage`."""
    sets = len(format.layout.sets)
    codes = np.array(unpack(tuple(arrays[:sets]), format.layout))
    scales = [np.array(array) for array in arrays[sets:]]
    value = np.asarray(jnp.asarray(garbage, format.scale_dtype))
    for b, limit in enumerate(limits):
        codes[b, :, limit:] = (1 << format.layout.bits) - 1
        for array in scales:  # a group is in use as long as one of its tokens is
            bits = value.view(np.uint16) if array.dtype == np.uint16 else value
            array[b, :, -(-limit // format.group_size) :] = bits
    return [*pack(jnp.asarray(codes), format.layout), *map(jnp.asarray, scales)]
