"""ZipCache's codec: keys and values of a block's salient tokens get more bits than the others.
Equations: README.md beside this file."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from kvq_jax.arrays import grouped_array
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.arrays.uniform import NEAR, OutOfRange, as_stored, finite_rows, saturation_limit
from kvq_jax.codecs.codec import Codec, Side, TokensAt
from kvq_jax.codecs.facts import Facts, TokenGroup
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.layer.attention import PLAIN, Attention
from kvq_jax.methods.zipcache.saliency import DTYPE, Probes, probes_of, saliency
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, RowsBKTH, Tree
from kvq_jax.types.pytree import describe, pytree
from kvq_jax.types.rope import Rope

MASK_BITS = 8  # of a byte of the mask: neighbouring tokens, the first in the lowest bit
MIN_NORM = 2.0**-14  # of a channel: float16's least normal number


@pytree
@dataclasses.dataclass(frozen=True)
class ZipArray:
    """Codes of the salient tokens and of the others.

    mask: [B, K, S/8], set for salient tokens.
    norm: [B, K, S/block, H], of each channel of values.
    keys, values: the salient tokens of each block in their order, then the others.
    """

    mask: UInt8[Array, "B K bytes"]
    norm: Float[Array, "B K blocks H"]
    keys: tuple[GroupedArray, GroupedArray]
    values: tuple[GroupedArray, GroupedArray]

    def out_of_range(self) -> OutOfRange:
        """Return which blocks meet an end of the range of keys, of quotients, or of norms, the
        square of which is the largest value."""
        blocks = self.norm.shape[2]

        def by_block(runs: Bool[Array, "B n"]) -> Bool[Array, "B blocks"]:
            return jnp.any(runs.reshape(len(runs), blocks, runs.shape[1] // blocks), axis=2)

        largest = jnp.square(self.norm.astype(jnp.float32))
        large = jnp.any(largest >= NEAR * saturation_limit(self.norm.dtype), axis=(1, 3))
        small = jnp.zeros_like(large)
        for part in (*self.keys, *self.values):
            ends = part.out_of_range()
            large, small = large | by_block(ends.large), small | by_block(ends.small)
        return OutOfRange(large, small)


@dataclasses.dataclass(frozen=True)
class ZipCodec(Codec):
    """One body for keys and values, whose rows are [k, v], because a token is salient for both.

    bits: of salient tokens and of the others. salient: of a block of `block` tokens, for each head.
    attention: the layer's, which the probes' softmax follows. Statistics: the prompt's probes.
    """

    side: Side
    channels: int
    query_heads: int
    block: int
    bits: tuple[int, int]
    salient: int
    probes: int
    scale_dtype: str
    attention: Attention = PLAIN

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return jnp.concatenate([inputs.k_rot, inputs.v.astype(inputs.k_rot.dtype)], axis=-1)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        return rows[..., : self.channels] if self.side == "k" else rows[..., self.channels :]

    def body(self, batch: int, heads: int, tokens: int) -> ZipArray:
        axes = Axis("batch", batch), Axis("kv_heads", heads)
        mask = BodySpec((*axes, Axis("tokens", tokens, per=MASK_BITS)), "uint8")
        norm = BodySpec(
            (*axes, Axis("tokens", tokens, per=self.block), Axis("channels", self.channels)),
            self.scale_dtype,
        )

        def along_tokens(of_block: BodySpec) -> BodySpec:
            entries = Axis("tokens", tokens, per=self.block, each=of_block["tokens"].size)
            return dataclasses.replace(
                of_block,
                axes=tuple(entries if axis.name == "tokens" else axis for axis in of_block.axes),
            )

        def part(side: Side) -> tuple[GroupedArray, ...]:
            of_block = (
                grouped_array.specs(format, batch, heads, format.block)
                for format in self._formats(side)
            )
            return tuple(jax.tree.map(along_tokens, specs) for specs in of_block)

        return describe(ZipArray, mask=mask, norm=norm, keys=part("k"), values=part("v"))

    def quantize(self, params: Tree, stats: Probes, rows: CachedRows, at: TokensAt) -> ZipArray:
        limit = saturation_limit(self.scale_dtype)
        keys, values = (finite_rows(half, limit) for half in jnp.split(rows, 2, axis=-1))
        mask = chosen(saliency(stats, keys, at.positions, self.attention), self.block, self.salient)
        blocks = self._blocks(values)
        norm = as_stored(jnp.sqrt(jnp.max(jnp.abs(blocks), axis=3)), self.scale_dtype)
        scaled = (blocks / _norms(norm)).reshape(values.shape)
        bits = mask.astype(jnp.uint8).reshape(*mask.shape[:2], -1, MASK_BITS) << _shifts()
        packed = jnp.sum(bits, axis=-1, dtype=jnp.uint8)
        return ZipArray(packed, norm, self._coded("k", keys, mask), self._coded("v", scaled, mask))

    def dequantize(self, params: Tree, stats: Probes, body: ZipArray) -> CachedRows:
        bits = (body.mask[..., None] >> _shifts()) & jnp.uint8(1)
        mask = bits.reshape(*body.mask.shape[:2], -1, self.block).astype(bool)
        keys, values = (self._decoded(parts, mask) for parts in (body.keys, body.values))
        values = (self._blocks(values) * _norms(body.norm)).reshape(keys.shape)
        return jnp.concatenate([keys, values], axis=-1)

    @property
    def statistics(self) -> Statistics:
        return Statistics(
            self._probes_spec,
            lambda params, inputs: probes_of(inputs, self.probes, self.attention),
            unprompted=0,
        )

    @property
    def facts(self) -> Facts:
        return Facts(
            form="other",
            joint=True,
            token_group=TokenGroup(min(self.bits), self.block),
            requantizes="drifts",
            row_axes=lambda heads, head_dim: (
                Axis("kv_heads", heads),
                Axis("channels", head_dim, each=2),
            ),
        )

    @property
    def kernels(self) -> Kernels:
        return unserved(
            "tokens of two widths in one block, which no GPU kernel reads",
            "tokens of two widths in one block, which no CPU kernel reads",
        )

    def _probes_spec(self, batch: int, heads: int) -> dict[str, ArraySpec]:
        several = (
            Axis("batch", batch),
            Axis("kv_heads", heads, each=self.query_heads),
            Axis("none", self.probes),
        )
        return {
            "queries": ArraySpec((*several, Axis("channels", self.channels)), DTYPE),
            "normalizers": ArraySpec(several, "float32"),
            "positions": ArraySpec((several[0], several[2]), "int32"),
        }

    def _formats(self, side: Side) -> tuple[GroupFormat, ...]:
        """Return the formats of salient tokens and of the others: keys in one group for each
        channel of a block, values of each token."""
        sizes = zip(self.bits, (self.salient, self.block - self.salient), strict=True)
        if side == "k":
            return tuple(
                GroupFormat(bits, "asym", "tokens", size, self.channels, size, self.scale_dtype)
                for bits, size in sizes
            )
        return tuple(
            GroupFormat(
                bits, "asym", "channels", self.channels, self.channels, size, self.scale_dtype
            )
            for bits, size in sizes
        )

    def _blocks(self, x: RowsBKTH) -> Float[Array, "B K n block H"]:
        return x.reshape(*x.shape[:2], -1, self.block, self.channels)

    def _coded(
        self, side: Side, x: RowsBKTH, mask: Bool[Array, "B K n block"]
    ) -> tuple[GroupedArray, GroupedArray]:
        order = jnp.argsort(~mask, axis=-1, stable=True)  # salient tokens first
        sorted_rows = jnp.take_along_axis(self._blocks(x), order[..., None], axis=3)
        parts = jnp.split(sorted_rows, [self.salient], axis=3)
        flat = (part.reshape(*x.shape[:2], -1, self.channels) for part in parts)
        salient, others = (
            grouped_array.quantize(rows, format)
            for rows, format in zip(flat, self._formats(side), strict=True)
        )
        return salient, others

    def _decoded(
        self, parts: tuple[GroupedArray, ...], mask: Bool[Array, "B K n block"]
    ) -> RowsBKTH:
        """Return the rows of all tokens in their order, [B, K, n * block, H]."""
        rows = [grouped_array.dequantize(part) for part in parts]
        sorted_rows = jnp.concatenate(
            [part.reshape(*mask.shape[:3], -1, self.channels) for part in rows], axis=3
        )
        at = jnp.where(
            mask, jnp.cumsum(mask, axis=-1) - 1, self.salient + jnp.cumsum(~mask, axis=-1) - 1
        )
        return jnp.take_along_axis(sorted_rows, at[..., None], axis=3, mode="clip").reshape(
            *mask.shape[:2], -1, self.channels
        )


def chosen(saliency: Float[Array, "B K T"], block: int, count: int) -> Bool[Array, "B K n block"]:
    """Return the mask of the `count` most salient tokens of each block, the earlier ones on a
    tie."""
    by_block = saliency.reshape(*saliency.shape[:2], -1, block)
    return jnp.argsort(jnp.argsort(-by_block, axis=-1, stable=True), axis=-1) < count


def _shifts() -> UInt8[Array, "1 1 1 bits"]:
    return jnp.arange(MASK_BITS, dtype=jnp.uint8)[None, None, None]


def _norms(norm: Float[Array, "B K n H"]) -> Float[Array, "B K n 1 H"]:
    """Return the divisors of values, from the norms as stored."""
    return jnp.maximum(norm.astype(jnp.float32), MIN_NORM)[..., None, :]
