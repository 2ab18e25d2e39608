"""GEAR's codec: uniform groups, with a low-rank product and outliers for their errors. Equations:
README.md beside this file."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from kvq_jax.arrays import grouped_array, low_rank, sparse_outliers
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.arrays.sparse_outliers import Pool, SparseOutliers
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.arrays.uniform import NEAR, OutOfRange, as_stored, finite_rows, saturation_limit
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.facts import Facts, OutlierCounts, Outliers, TokenGroup
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.types.array_types import Axis, CachedRows, RowsBKTH, Tree
from kvq_jax.types.pytree import describe, pytree

FACTOR_DTYPE = "float16"


@pytree
@dataclasses.dataclass(frozen=True)
class GearArray:
    """Uniform codes, with low-rank factors and outliers of their errors.

    dense: uniform codes.
    left: [B, K, S, r], factors of each block, or None.
    right: [B, K, S/block, H r], likewise.
    outliers: None without any.
    """

    dense: GroupedArray
    left: Float[Array, "B K S r"] | None
    right: Float[Array, "B K blocks Hr"] | None
    outliers: SparseOutliers | None

    def out_of_range(self) -> OutOfRange:
        """Return which tokens meet an end of the range of rows, with all that is added to them."""
        limit = NEAR * saturation_limit(self.dense.format.scale_dtype)
        large = jnp.any(jnp.abs(dequantized(self)) >= limit, axis=(1, 3))
        small = self.dense.out_of_range().small
        if self.outliers is not None:
            pools = sparse_outliers.out_of_range(self.outliers).large
            large = large | jnp.repeat(pools, large.shape[1] // pools.shape[1], axis=1)
        return OutOfRange(large, jnp.repeat(small, large.shape[1] // small.shape[1], axis=1))


@dataclasses.dataclass(frozen=True)
class GearCodec(OneSideCodec):
    """x^ = code * scale + zero + L R^T + outliers.

    rank, turns: of the low-rank part of each block and head (`low_rank.factors`).
    per_side: the outliers on each side of a channel's run of `pool.tokens` tokens (keys), or of a
        token's KV width (values).
    pool: None without outliers.
    """

    side: Side
    format: GroupFormat
    rank: int
    turns: int
    per_side: int
    pool: Pool | None
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> GearArray:
        axes, format = (Axis("batch", batch), Axis("kv_heads", heads)), self.format
        left = right = outliers = None
        if self.rank:
            left = BodySpec((*axes, Axis("tokens", tokens), Axis("none", self.rank)), FACTOR_DTYPE)
            blocks = Axis("tokens", tokens, per=format.block)
            right = BodySpec(
                (*axes, blocks, Axis("channels", format.channels, each=self.rank)), FACTOR_DTYPE
            )
        if self.pool:
            outliers = sparse_outliers.specs(batch, heads, tokens, self.pool, FACTOR_DTYPE)
        dense = grouped_array.specs(format, batch, heads, tokens)
        return describe(GearArray, dense=dense, left=left, right=right, outliers=outliers)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> GearArray:
        """Quantize rows without their outliers, then approximate the errors of the codes, then
        store the outliers against both.

        NaN counts as 0, infinities as the largest entry of their row.
        """
        x = finite_rows(rows, saturation_limit(self.format.scale_dtype))
        mask = self._outliers(x) if self.pool else jnp.zeros(x.shape, bool)
        dense = grouped_array.quantize(
            jnp.where(mask, self._means(x), x) if self.pool else x, self.format
        )
        missed = x - grouped_array.dequantize(dense)
        left = right = outliers = None
        if self.rank:
            left, right = self._factors(jnp.where(mask, 0, missed))
            missed = missed - _product(left, right, dense.format.channels)
        if self.pool:
            outliers = sparse_outliers.collect(missed, mask, self.pool, FACTOR_DTYPE)
        return GearArray(dense, left, right, outliers)

    def dequantize(self, params: Tree, stats: Tree, body: GearArray) -> CachedRows:
        return dequantized(body)

    @property
    def facts(self) -> Facts:
        format, pool = self.format, self.pool
        return dataclasses.replace(
            super().facts,
            code_layout=format.layout,
            channel_group_bits=format.code_bits if format.axis == "channels" else None,
            token_group=self._token_group,
            requantizes="drifts",
            outliers=pool and Outliers(lambda heads: pool.slots / pool.tokens, _counts),
        )

    @property
    def kernels(self) -> Kernels:
        return unserved(
            "low-rank factors and outliers beside the codes, which no GPU kernel adds",
            "low-rank factors and outliers beside the codes, which no CPU kernel adds",
        )

    def _factors(
        self, missed: RowsBKTH
    ) -> tuple[Float[Array, "B K T r"], Float[Array, "B K blocks Hr"]]:
        batch, heads, tokens, channels = missed.shape
        blocks = missed.reshape(batch, heads, -1, self.format.block, channels)
        start = jnp.asarray(start_matrix(channels, self.rank))[None, None, None]
        left, right = low_rank.factors(blocks, start, self.turns)
        limit = saturation_limit(FACTOR_DTYPE)
        stored = as_stored(jnp.clip(right, -limit, limit), FACTOR_DTYPE)
        left = as_stored(left.reshape(batch, heads, tokens, self.rank), FACTOR_DTYPE)
        return left, stored.reshape(batch, heads, blocks.shape[2], channels * self.rank)

    @property
    def _token_group(self) -> TokenGroup | None:
        """The groups of a channel, if no factors take up what turns within a block."""
        if self.format.axis == "channels" or self.rank:
            return None
        return TokenGroup(self.format.code_bits, self.format.group_size)

    def _outliers(self, x: RowsBKTH) -> Bool[Array, "B K T H"]:
        """Return the mask of the `per_side` smallest and largest entries of each run of a channel
        (keys), or of each token (values)."""
        flat = self._laid_out(x)
        order = jnp.argsort(jnp.argsort(flat, axis=-1), axis=-1)
        chosen = (order < self.per_side) | (order >= flat.shape[-1] - self.per_side)
        return self._put_back(chosen, x.shape)

    def _means(self, x: RowsBKTH) -> RowsBKTH:
        flat = self._laid_out(x)
        return self._put_back(
            jnp.broadcast_to(jnp.mean(flat, axis=-1, keepdims=True), flat.shape), x.shape
        )

    def _laid_out(self, x: Array) -> Array:
        """Return the entries among which outliers are chosen along the last axis."""
        batch, heads, tokens, channels = x.shape
        if self.side == "v":
            return jnp.swapaxes(x, 1, 2).reshape(batch, tokens, heads * channels)
        assert self.pool is not None, "outliers of keys are chosen in runs of tokens"
        return jnp.swapaxes(x.reshape(batch, heads, -1, self.pool.tokens, channels), 3, 4)

    def _put_back(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """Return the rows that `_laid_out` laid out."""
        batch, heads, tokens, channels = shape
        if self.side == "v":
            return jnp.swapaxes(flat.reshape(batch, tokens, heads, channels), 1, 2)
        return jnp.swapaxes(flat, 3, 4).reshape(shape)


def _counts(body: GearArray) -> OutlierCounts:
    assert body.outliers is not None, "a codec with slots stores outliers"
    return OutlierCounts(*sparse_outliers.counts(body.outliers))


@functools.cache
def start_matrix(channels: int, rank: int) -> Float[np.ndarray, "H r"]:
    """Return the matrix that the iteration starts from, the same for every block: cosines of
    different frequencies, as in the DCT, fp32."""
    grid = np.outer(np.arange(channels) + 0.5, np.arange(rank) + 1)
    return np.cos(np.pi * grid / channels).astype(np.float32)


def dequantized(body: GearArray) -> RowsBKTH:
    """Return code * scale + zero + L R^T + outliers, fp32."""
    rows = grouped_array.dequantize(body.dense)
    if body.left is not None and body.right is not None:
        rows = rows + _product(body.left, body.right, rows.shape[3])
    return rows if body.outliers is None else sparse_outliers.add(rows, body.outliers)


def _product(
    left: Float[Array, "B K T r"], right: Float[Array, "B K blocks Hr"], channels: int
) -> RowsBKTH:
    batch, heads, blocks, _ = right.shape
    rank = left.shape[3]
    factors = right.astype(jnp.float32).reshape(batch, heads, blocks, channels, rank)
    by_block = left.astype(jnp.float32).reshape(batch, heads, blocks, -1, rank)
    product = jnp.einsum("bkntr,bknhr->bknth", by_block, factors, precision=lax.Precision.HIGHEST)
    return product.reshape(batch, heads, -1, channels)
