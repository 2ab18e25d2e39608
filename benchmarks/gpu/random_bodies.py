"""Bodies of caches with random contents, made on the device: what kernels read of them, and the
rows that they stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kvq_jax as kvq
from benchmarks.cpu.timing import Shape
from benchmarks.gpu.device_timing import random_words, scattered, uniform
from kvq_jax.arrays.codebook_array import CodebookArray
from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.arrays.polar_array import PolarArray
from kvq_jax.arrays.run_array import RunArray
from kvq_jax.arrays.sparse_outliers import SparseOutliers
from kvq_jax.arrays.stored import BodySpec, load_body
from kvq_jax.attention.dispatch import unsupported
from kvq_jax.attention.fused import reader_and_arrays
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.layer.regions import Regions
from kvq_jax.types.array_types import ArraySpec
from kvq_jax.types.rope import Rope
from pallas_kernels.readers.base import Reader
from pallas_kernels.tiles.layout import SPAN

CHECKED_HEADS = 2  # KV heads of the first sequence that are compared with the reference


# Random contents


def random_body(leaves: Any, seed: Array) -> Any:
    """Make arrays as a cache stores them, for a tree of `BodySpec`: random codes, and scales that
    make them rows of about -1 .. 1."""
    return jax.tree.map(
        lambda spec, values: spec.store(values), leaves, _random_values(leaves, seed)
    )


@functools.singledispatch
def _random_values(leaves: Any, seed: Array) -> Any:
    """Make the values of a body before they are stored. Every type of body registers how."""
    raise TypeError(f"no random contents for a body of {type(leaves).__name__}")


@_random_values.register
def _(leaves: BodySpec, seed: Array) -> Any:
    return uniform(leaves.shape, seed, -1.0, 1.0, leaves.dtype)


def _random_codes(words: tuple[Any, ...], seed: Array) -> tuple[Array, ...]:
    return tuple(
        random_words(leaf.shape, seed + jnp.uint32(1000 * i)) for i, leaf in enumerate(words)
    )


def _random(leaf: Any, seed: Array, offset: int, low: float, high: float) -> Any:
    return (
        None
        if leaf is None
        else uniform(leaf.shape, seed + jnp.uint32(offset), low, high, leaf.dtype)
    )


@_random_values.register
def _(leaves: GroupedArray, seed: Array) -> GroupedArray:
    step = 2 / (2**leaves.format.code_bits - 1)
    scale, zero = (
        _random(leaves.scale, seed, 2000, 0.7 * step, 1.3 * step),
        _random(leaves.zero, seed, 3000, -1.2, -0.8),
    )
    return GroupedArray(_random_codes(leaves.words, seed), scale, zero, leaves.format)


@_random_values.register
def _(leaves: CodebookArray, seed: Array) -> CodebookArray:
    """Make random codes with all slots of outliers in use."""
    scale, zero = (
        _random(leaves.scale, seed, 2000, 0.7, 1.3),
        _random(leaves.zero, seed, 3000, -0.1, 0.1),
    )
    heads = leaves.words[0]["kv_heads"].size
    sparse = (
        None
        if leaves.outliers is None
        else _random_outliers(leaves.outliers, heads, leaves.format.channels, seed)
    )
    return CodebookArray(_random_codes(leaves.words, seed), scale, zero, sparse, leaves.format)


def _random_outliers(
    leaves: SparseOutliers, heads: int, channels: int, seed: Array
) -> SparseOutliers:
    """Give each head an equal share of a pool's slots, and put one outlier in each of as many runs
    of its places: none twice."""
    spec: Any = leaves.index
    slots, places = spec["none"].size, spec["tokens"].per * channels
    ends = slots * jnp.arange(1, heads + 1) // heads
    slot = jnp.arange(slots)
    head = jnp.sum(slot[:, None] >= ends[None], axis=-1)
    first, many = jnp.append(0, ends)[head], jnp.diff(ends, prepend=0)[head]
    begin, end = (((slot - first + i) * places // many)[None, None] for i in (0, 1))
    place = begin + (
        scattered(spec.shape, seed + jnp.uint32(4000)) % (end - begin).astype(jnp.uint32)
    ).astype(jnp.int32)
    dropped = None if leaves.dropped is None else jnp.zeros(leaves.dropped.shape, jnp.uint16)
    return SparseOutliers(
        place.astype(jnp.uint16),
        _random(leaves.residual, seed, 5000, -3.0, 3.0),
        jnp.broadcast_to(ends.astype(jnp.uint16), leaves.ends.shape),
        dropped,
    )


@_random_values.register
def _(leaves: PolarArray, seed: Array) -> PolarArray:
    """Make radii of about 0.2 to 1.4 and arcs of 1 to 2 radians anywhere on the circle, for 4 bits
    each."""
    radii, angles = (
        2.0 ** (4 - bits) for bits in (leaves.format.radius_bits, leaves.format.angle_bits)
    )
    return PolarArray(
        _random_codes(leaves.words, seed),
        _random(leaves.radius_scale, seed, 2000, 0.06 * radii, 0.08 * radii),
        _random(leaves.radius_zero, seed, 3000, 0.1, 0.3),
        _random(leaves.angle_scale, seed, 4000, 0.06 * angles, 0.12 * angles),
        _random(leaves.angle_zero, seed, 5000, -3.1, 3.1),
        leaves.format,
    )


@_random_values.register
def _(leaves: RunArray, seed: Array) -> RunArray:
    """Make factors of tokens from a half to 2."""
    scale: Any = leaves.scale
    factors = jnp.round(uniform(scale.shape, seed + jnp.uint32(2000), -8.0, 8.0)).astype(jnp.int8)
    return RunArray(
        tuple(
            _random_codes(words, seed + jnp.uint32(7000 * i))
            for i, words in enumerate(leaves.words)
        ),
        factors,
        leaves.format,
    )


def random_parameters(codec: Codec, heads: int, seed: Array) -> dict[str, Array]:
    """Return parameters as from a calibration, {} for codecs without: rows are about -1 .. 1, and
    hardly an entry is an outlier."""
    specs = codec.learning.parameters(heads)
    if "energies" in specs:
        return codec.learning.carry(_sorted_channels(specs, seed))
    ranges = {
        "levels": (-1, 1),
        "qnorm": (0, 0),
        "scale": (0.7, 1.3),
        "zero": (-0.1, 0.1),
        "lower": (-9, -8),
        "upper": (8, 9),
    }
    parameters = {name: uniform(spec.shape, seed, *ranges[name]) for name, spec in specs.items()}
    if "levels" in parameters:
        parameters |= {"levels": jnp.sort(parameters["levels"]), "qnorm": jnp.asarray([1.0, 0.0])}
    return codec.learning.carry(parameters)


def _sorted_channels(specs: Mapping[str, ArraySpec], seed: Array) -> dict[str, Array]:
    """Return waterfill's parameters: pairs of keys in a random order, and values in a random basis,
    by which kernels do not divide."""
    edge = specs["mean"].shape[-1] ** -0.5
    ranges = {
        "mean": (-0.1, 0.1),
        "scale": (0.3, 0.6),
        "energies": (0, 1),
        "analysis": (-edge, edge),
        "synthesis": (-edge, edge),
    }
    parameters = {
        name: uniform(spec.shape, seed, *ranges[name])
        for name, spec in specs.items()
        if name in ranges
    }
    if "place" in specs:
        heads, channels = specs["place"].shape
        rank = jnp.argsort(uniform((heads, channels // 2), seed, 0.0, 1.0), axis=-1).astype(
            jnp.int32
        )
        parameters["place"] = jnp.concatenate([2 * rank, 2 * rank + 1], axis=-1)
    return parameters


def rope_of(head_dim: int) -> Rope:
    """Return the rotation of keys that are cached before RoPE."""
    exponents = jnp.arange(head_dim // 2, dtype=jnp.float32) / (head_dim // 2)
    return Rope(10000.0**-exponents, jnp.ones((), jnp.float32))


# One side of a cache


def plan_of(spec: str, shape: Shape) -> LayerPlan:
    """Return the plan of a layer whose body has room for the shape's tokens."""
    heads, cache = shape.kv_heads * shape.group, kvq.parse(spec)
    dims = CacheDims(1, heads, shape.kv_heads, shape.head_dim, heads * shape.head_dim)
    return cache.layer(0, dims, cache.sink + shape.tokens + cache.recent, "bfloat16")


@dataclasses.dataclass(frozen=True)
class Body:
    """Keys or values of a layer whose body holds all tokens, the first at position 0.

    A copy is (parameters, stored arrays). Prompt statistics are as after no prompt.
    """

    codec: Codec
    shape: Shape

    @functools.cached_property
    def leaves(self) -> Any:
        """Return the tree of `BodySpec`."""
        return self.codec.body(self.shape.batch, self.shape.kv_heads, self.shape.tokens)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the stored arrays. Parameters do not grow with tokens and do not
        count."""
        return kvq.size.nbytes(self.leaves)

    @functools.cached_property
    def reader(self) -> Reader:
        """Return the reader of its arrays. Raises ValueError if kernels cannot read them."""
        reader = self.codec.kernels.reader()
        if isinstance(reader, str):
            raise ValueError(reader)
        return reader

    def copy(self, seed: Array) -> tuple[dict[str, Array], Any]:
        return random_parameters(self.codec, self.shape.kv_heads, seed), random_body(
            self.leaves, seed
        )

    def arrays(self, copy: tuple[Any, Any]) -> list[Array]:
        """Return the arrays of a copy that a kernel reads."""
        _, arrays = reader_and_arrays(
            self.codec, *copy, rope_of(self.shape.head_dim), Regions(0, 0, SPAN, self.shape.tokens)
        )
        return arrays

    def rows(self, copy: tuple[Any, Any]) -> Float[Array, "B K S H"]:
        """Return the keys after RoPE, or the values, that a copy stands for. It may hold a part of
        the rows and heads."""
        params, stored = copy
        batch, heads, *_ = jax.tree.leaves(stored)[0].shape
        body = load_body(self.leaves, stored)
        rows = self.codec.dequantize(params, self.codec.statistics.initial(batch, heads), body)
        positions = jnp.broadcast_to(jnp.arange(self.shape.tokens), (batch, self.shape.tokens))
        return self.codec.vectors(params, rows, positions, rope_of(self.shape.head_dim))

    def checked_rows(self, copy: tuple[Any, Any]) -> Float[Array, "1 C S H"]:
        """Return `rows` of the first sequence and CHECKED_HEADS heads. Other heads are dequantized
        only if heads share arrays."""
        params, stored = copy
        apart = not params and all(
            "kv_heads" in spec.names and spec["kv_heads"].per == 1
            for spec in jax.tree.leaves(self.leaves)
        )
        part = checked_part(stored) if apart else jax.tree.map(lambda array: array[:1], stored)
        return self.rows((params, part))[:, :CHECKED_HEADS]


def checked_part(stored: Any) -> Any:
    """Return the part of arrays [B, K, ...] that is compared with the reference."""
    return jax.tree.map(lambda array: array[:1, :CHECKED_HEADS], stored)


def bodies_of(spec: str, shape: Shape) -> tuple[Body, Body]:
    """Return the keys and values of a cache that kernels attend to. Raises ValueError with the
    dispatcher's reason if they do not."""
    plan = plan_of(spec, shape)
    if reason := unsupported(plan, shape.kv_heads * shape.group, 1):
        raise ValueError(reason)
    return Body(plan.k, shape), Body(plan.v, shape)
