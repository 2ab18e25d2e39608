"""Block-GTQ's codec and its calibration. Equations and deviations: README.md beside this file."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from kvq_jax.arrays.codebooks import look_up
from kvq_jax.arrays.packing import Words, pack, unpack
from kvq_jax.arrays.rotations import turn, turn_back
from kvq_jax.arrays.run_array import RunFormat
from kvq_jax.arrays.stored import BodySpec, word_specs
from kvq_jax.arrays.uniform import OutOfRange, finite_rows, out_of_range
from kvq_jax.codecs.codec import Side, TokensAt
from kvq_jax.codecs.dots import dot_rows, weigh_rows
from kvq_jax.codecs.facts import Facts, PaperCount
from kvq_jax.codecs.fitting import Rows, check_rows
from kvq_jax.codecs.kernels import Kernels, table_of, unserved
from kvq_jax.codecs.learning import Learning, QueryMoments, required
from kvq_jax.codecs.one_side import OneSideCodec
from kvq_jax.codecs.rotating import MAX_ENTRY
from kvq_jax.methods.turboquant.levels import sphere_levels
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, Tree
from kvq_jax.types.pytree import describe, pytree
from kvq_jax.types.rope import Rope

SELECTED = 4  # bits; levels of more are gathered, not chosen by a tree of selects


@pytree
@dataclasses.dataclass(frozen=True)
class DirectionArray:
    """Codes of the directions of one group of channels.

    words: int16 [B, K, S/n, w] for each plane set.
    factor: [B, K, S], the norm of a row over the norm of what its codes say.
    """

    words: Words
    factor: Float[Array, "B K S"]

    def out_of_range(self) -> OutOfRange:
        """Return which tokens meet an end of the range of factors."""
        limit = float(jnp.finfo(self.factor.dtype).max)
        return out_of_range(self.factor.astype(jnp.float32), self.factor, limit, 2)


@dataclasses.dataclass(frozen=True)
class RateGroupsCodec(OneSideCodec):
    """Groups of channels of one width. Each is rotated, and stored as the codes of its direction
    and a factor: its norm over the norm of what the codes say.

    ordered: True for keys, whose channels are sorted by the energy of their pairs. Parameters then:

        place [K, H] int32      a channel's place in that order, the two of a pair side by side
        energies [K, H/2]       (E|q_i|^2 + E|k_i|^2) / 2 of the sorted pairs
    """

    side: Side
    format: RunFormat
    scale_dtype: str
    ordered: bool
    pre_rope: bool = False

    def body(self, batch: int, heads: int, tokens: int) -> Tree:
        axes = Axis("batch", batch), Axis("kv_heads", heads), Axis("tokens", tokens)
        return tuple(
            describe(
                DirectionArray,
                words=word_specs(layout, batch, heads, tokens),
                factor=BodySpec(axes, self.scale_dtype),
            )
            for layout in self.format.layouts
        )

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> Tree:
        x = self._sorted(params, finite_rows(rows, MAX_ENTRY))
        maximum = float(jnp.finfo(self.scale_dtype).max)
        body = []
        for layout, part in zip(self.format.layouts, self._parts(x), strict=True):
            norm = jnp.linalg.norm(part, axis=-1, keepdims=True)
            y = turn(part) / jnp.where(norm == 0, 1, norm)
            levels = np.asarray(sphere_levels(layout.bits, layout.channels), np.float32)
            codes = jnp.searchsorted(jnp.asarray((levels[1:] + levels[:-1]) / 2), y)
            size = jnp.linalg.norm(self._levels(codes, layout.bits), axis=-1)
            factor = jnp.minimum(norm[..., 0] / size, maximum).astype(self.scale_dtype)
            body.append(DirectionArray(pack(codes, layout), factor))
        return tuple(body)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        read = [turn_back(levels * factor[..., None]) for levels, factor in self._read(body)]
        return self._unsorted(params, jnp.concatenate(read, axis=-1))

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        """Return the rotated part of the queries for each group."""
        return tuple(map(turn, self._parts(self._sorted(params, q.astype(jnp.float32)))))

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        groups = zip(query, self._read(body), strict=True)
        parts = [dot_rows(q, levels) * factor[:, :, None] for q, (levels, factor) in groups]
        return functools.reduce(jnp.add, parts)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        sums = [
            turn_back(weigh_rows(weights * factor[:, :, None], levels))
            for levels, factor in self._read(body)
        ]
        return self._unsorted(params, jnp.concatenate(sums, axis=-1))

    @property
    def facts(self) -> Facts:
        channels = self.format.channels
        stored = sum(width * count + 16 for width, count in self.format.runs) / channels
        paper = PaperCount(bits=lambda *_: stored)
        # What codes say of a direction is not of norm 1. If rows have heavy tails it is far from
        # it, and read again it gets other codes. One or two bits say too little of a tail.
        drifts = max(width for width, _ in self.format.runs) > 2
        return dataclasses.replace(
            super().facts, requantizes="drifts" if drifts else "exact", paper=paper
        )

    @property
    def learning(self) -> Learning:
        if not self.ordered:
            return Learning()
        return Learning(self._parameters, fit_to_queries=self._fit, key="energies=queries+keys")

    @property
    def kernels(self) -> Kernels:
        return unserved("no kernel turns each group of channels by a matrix of its own")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"widths": "".join(map(str, self.format.widths))}

    def _parameters(self, heads: int) -> dict[str, ArraySpec]:
        head, channels = Axis("kv_heads", heads), self.format.channels
        return {
            "place": ArraySpec((head, Axis("channels", channels)), "int32"),
            "energies": ArraySpec((head, Axis("pairs", channels // 2)), "float32"),
        }

    def _fit(self, rows: Rows, gradients: Rows, moments: QueryMoments) -> dict[str, np.ndarray]:
        check_rows(rows, gradients)
        squares = np.square(rows, dtype=np.float64).mean(axis=0)
        squares += np.diagonal(moments, axis1=1, axis2=2)
        energies = np.add(*np.split(squares, 2, axis=-1)) / 2
        order = np.argsort(-energies, axis=-1, kind="stable")
        rank = np.argsort(order, axis=-1)
        return {
            "place": np.concatenate([2 * rank, 2 * rank + 1], axis=-1).astype(np.int32),
            "energies": np.take_along_axis(energies, order, axis=-1).astype(np.float32),
        }

    def _parts(self, x: Float[Array, "B K T H"]) -> list[Float[Array, "B K T group"]]:
        ends = np.cumsum([count for _, count in self.format.runs])
        return jnp.split(x, ends[:-1], axis=-1)

    def _read(self, body: Tree) -> list[tuple[Float[Array, "B K T group"], Float[Array, "B K T"]]]:
        """Return each group's rotated directions, not yet of norm 1, and their factors, fp32."""
        groups = zip(self.format.layouts, body, strict=True)
        return [
            (self._levels(unpack(part.words, layout), layout.bits), part.factor.astype(jnp.float32))
            for layout, part in groups
        ]

    def _levels(
        self, codes: Integer[Array, "B K T group"], bits: int
    ) -> Float[Array, "B K T group"]:
        levels = table_of(sphere_levels(bits, codes.shape[-1]))
        return look_up(levels, codes) if bits <= SELECTED else levels[codes]

    def _sorted(self, params: Tree, x: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
        return _gathered(x, jnp.argsort(_place(params), axis=-1)) if self.ordered else x

    def _unsorted(self, params: Tree, x: Float[Array, "B K T H"]) -> Float[Array, "B K T H"]:
        return _gathered(x, _place(params)) if self.ordered else x


def _gathered(x: Float[Array, "B K T H"], index: Int[Array, "K H"]) -> Float[Array, "B K T H"]:
    return jnp.take_along_axis(x, index[None, :, None], axis=-1)


def _place(params: Tree) -> Int[Array, "K H"]:
    return required(params, "block_gtq needs calibrated energies")["place"]
