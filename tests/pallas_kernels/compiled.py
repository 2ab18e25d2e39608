"""The functions that make stored arrays, compiled whole: one by one, each of their operations would
be compiled for every shape."""

import jax

from kvq_jax.arrays import grouped_array, packing, polar_array
from kvq_jax.arrays.stored import load_body

pack = jax.jit(packing.pack, static_argnums=1)
unpack = jax.jit(packing.unpack, static_argnums=1)
dequantize_groups = jax.jit(grouped_array.dequantize)
dequantize_pairs = jax.jit(polar_array.dequantize)


def _groups(rows, format):
    body = grouped_array.quantize(rows, format)
    leaves = grouped_array.specs(format, 1, 1, format.block)
    arrays = jax.tree.leaves(jax.tree.map(lambda leaf, array: leaf.store(array), leaves, body))
    return body, arrays, grouped_array.dequantize(body)


def _pairs(rows, format):
    leaves = polar_array.specs(format, 1, 1, format.block)
    quantized = polar_array.quantize(rows, format)
    body = jax.tree.map(lambda leaf, array: leaf.store(array), leaves, quantized)
    loaded = load_body(leaves, body)
    return loaded, jax.tree.leaves(body), polar_array.dequantize(loaded)


# (rows, format) -> (what is stored, its arrays, the rows that they stand for)
stored_groups = jax.jit(_groups, static_argnums=1)
stored_pairs = jax.jit(_pairs, static_argnums=1)
