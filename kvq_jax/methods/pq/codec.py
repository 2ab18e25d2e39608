"""The codec of product quantization. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt16

from kvq_jax.arrays.packing import PlaneLayout, Words, pack, run_layout, unpack
from kvq_jax.arrays.stored import word_specs
from kvq_jax.arrays.uniform import finite_rows
from kvq_jax.codecs.codec import Codec, Side, TokensAt
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.fitting import Rows
from kvq_jax.codecs.kernels import Kernels, unserved
from kvq_jax.codecs.learning import Learning, required
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.codecs.rotating import MAX_ENTRY
from kvq_jax.methods.pq import fit
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, Tree
from kvq_jax.types.rope import Rope

# More query rows of a KV head read dequantized keys: a table has 2^bits entries for each row, and a
# row takes one gathered number for each group of each key.
LOOKED_UP = 16


@dataclasses.dataclass(frozen=True)
class ProductCodec(OneSideCodec):
    """The index of the nearest codeword, for each group of channels of a token and head.

    A group is `group_size` / 2 neighbouring RoPE pairs. Parameters:

        codewords [K, H/d, 2^bits, d] float16
        metric [K, H/d, d, d] float32    the distance of x and c is (x - c) metric (x - c)
    """

    side: Side
    head_dim: int
    group_size: int
    bits: int
    block: int
    pre_rope: bool = False

    @property
    def groups(self) -> int:
        return self.head_dim // self.group_size

    @property
    def layout(self) -> PlaneLayout:
        return run_layout(self.bits, self.groups, self.block)

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        return word_specs(self.layout, batch, heads, tokens)

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Words:
        params = calibrated(params)
        groups = cut(finite_rows(rows, MAX_ENTRY), self.group_size)

        def nearest(
            group: tuple[
                Float[Array, "B K T d"], Float[Array, "K entries d"], Float[Array, "K d d"]
            ],
        ) -> UInt16[Array, "B K T"]:
            x, codewords, metric = group
            c = codewords.astype(jnp.float32)
            pointed = jnp.einsum("ked,kdf->kef", c, metric, precision=lax.Precision.HIGHEST)
            size = jnp.sum(c * pointed, axis=-1)[None, :, None] / 2
            product = jnp.einsum("bktd,ked->bkte", x, pointed, precision=lax.Precision.HIGHEST)
            return jnp.argmin(size - product, axis=-1).astype(jnp.uint16)

        # one group after the other: the distances of all of them would be 2^bits / d times the rows
        by_group = (groups, 3), (params["codewords"], 1), (params["metric"], 1)
        first = (jnp.moveaxis(a, i, 0) for a, i in by_group)
        return pack(jnp.moveaxis(lax.map(nearest, tuple(first)), 0, -1), self.layout)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        codes = jnp.moveaxis(unpack(body, self.layout), -1, 2)[..., None].astype(jnp.int32)
        codewords = calibrated(params)["codewords"][None].astype(jnp.float32)
        read = jnp.take_along_axis(codewords, codes, axis=3, mode="clip")
        return joined(jnp.moveaxis(read, 2, 3))

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """Return the products of each query row with all codewords [B, K, R, H/d, 2^bits], or the
        rows if there are more than LOOKED_UP, or if keys must be rotated first."""
        if self.pre_rope or q.shape[2] > LOOKED_UP:
            return q
        codewords = calibrated(params)["codewords"].astype(jnp.float32)
        return jnp.einsum(
            "bkrgd,kged->bkrge",
            cut(q.astype(jnp.float32), self.group_size),
            codewords,
            precision=lax.Precision.HIGHEST,
        )

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        if query.ndim == 4:
            return Codec.scores(self, params, stats, query, body, positions, rope)
        codes = jnp.moveaxis(unpack(body, self.layout), -1, 2)[:, :, None].astype(jnp.int32)
        return jnp.sum(jnp.take_along_axis(query, codes, axis=-1, mode="clip"), axis=3)

    @property
    def facts(self) -> Facts:
        return dataclasses.replace(super().facts, code_layout=self.layout)

    @property
    def learning(self) -> Learning:
        # Groups of another size, or with other codes, have other codebooks.
        rows = "before_rope" if self.pre_rope else "vectors"
        key = f"codes={self.bits}x{self.group_size},rows={rows},weights=fisher"
        return Learning(self._parameters, self._fit, before_rope=self.pre_rope, key=key)

    @property
    def kernels(self) -> Kernels:
        return unserved("no kernel reads codes of learned vectors")

    def _parameters(self, heads: int) -> dict[str, ArraySpec]:
        group = Axis("kv_heads", heads), Axis("none", self.groups)
        d = Axis("none", self.group_size)
        return {
            "codewords": ArraySpec((*group, Axis("none", 2**self.bits), d), "float16"),
            "metric": ArraySpec((*group, d, d), "float32"),
        }

    def _fit(self, rows: Rows, gradients: Rows) -> dict[str, Shaped[np.ndarray, "..."]]:
        return fit.codebooks(rows, gradients, self.group_size, 2**self.bits)


def cut(rows: Float[Array, "B K T H"], size: int) -> Float[Array, "B K T groups d"]:
    """Return the groups of rows: size / 2 neighbouring pairs (i, i + H/2) each, first entries
    first."""
    split = rows.reshape(*rows.shape[:-1], 2, -1, size // 2)
    return jnp.moveaxis(split, -3, -2).reshape(*rows.shape[:-1], -1, size)


def joined(groups: Float[Array, "B K T groups d"]) -> Float[Array, "B K T H"]:
    """Return the rows that `cut` cuts into these groups."""
    *batch, count, size = groups.shape
    split = jnp.moveaxis(groups.reshape(*batch, count, 2, size // 2), -2, -3)
    return split.reshape(*batch, count * size)


def calibrated(params: Tree) -> Tree:
    """Return the parameters. Raise ValueError if there are none."""
    return required(params, "pq needs calibrated codebooks")
