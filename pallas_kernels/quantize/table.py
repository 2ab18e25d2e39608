"""Quantize blocks of codes that index a table as they leave their ring, and collect their outliers
(outlier_slots.py).

    code = the number of midpoints between levels below (x - zero) / scale
    x ~ values[code] * scale + zero  (+ residual)

The scale is half of a range, and the zero point is its middle. The range belongs to a channel and
comes with the parameters, or it is the range of a token's entries, without outliers, in a group of
channels of one head or of all heads. These are the equations of `kvq_jax.arrays.codebook_array` and
of the codecs that use it, which also describe their behaviour on entries that are not finite.

Exactness. Scales and zero points are equal. Codes differ by one if a quotient lies within rounding
of a midpoint, because a GPU divides approximately.

A token's thresholds are two of its entries: `per_side` entries lie beyond each. Kernels cannot
sort, so the largest entry is found, then the largest below it, and so on, over one head after
another. Each program repeats this for its own head. For 1 % of 1024 channels that is 14 times 8
heads, an estimated 20,000 instructions of a warp, in one step of 32. Source: Hooper et al.,
KVQuant, sections 3.3 and 3.4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantize.blocks import Source
from pallas_kernels.quantize.outlier_slots import Slots, collect
from pallas_kernels.quantize.words import CodeWriter, tokens_of_slot
from pallas_kernels.quantize.writer import BlockWriter
from pallas_kernels.stored_scales import saturation_limit, stored_scale
from pallas_kernels.tiles.layout import SPAN, PlaneLayout

Vector = Float[Array, " tokens"]
RangesOf = Callable[[Any, Any], "Ranges"]  # The arguments are a head, and columns of one group.


class LevelTable(NamedTuple):
    """The numbers of a table, as scalars: the levels that codes are chosen by, and the values that
    codes stand for.
    """

    levels: list[Float[Array, ""]]
    values: list[Float[Array, ""]]

    def codes(
        self, x: Float[Array, "rows columns"], scale: Array, zero: Array
    ) -> Int[Array, "rows columns"]:
        """Return the index of the level nearest to (x - zero) / scale, the lower one on a tie."""
        y = (x - zero) / jnp.where(scale == 0, 1.0, scale)
        codes = jnp.zeros(y.shape, jnp.int32)
        for low, high in zip(self.levels, self.levels[1:], strict=False):
            codes += (y > (high + low) / 2).astype(jnp.int32)
        return codes

    def look_up(self, codes: Int[Array, "rows columns"]) -> Float[Array, "rows columns"]:
        """Return the values of codes, by a tree of selects."""
        entries: list[Array] = list(self.values)
        for bit in range(len(entries).bit_length() - 1):
            odd = ((codes >> bit) & 1) != 0
            entries = [
                jnp.where(odd, high, low)
                for low, high in zip(entries[::2], entries[1::2], strict=True)
            ]
        return entries[0]


class Ranges(NamedTuple):
    """The numbers that the codes of a tile depend on, fp32, [rows, columns], or 1 long if rows or
    columns share them.

    low, high: the range that non-finite entries are clipped to, and all entries if the range
    belongs to tokens. lower, upper: thresholds of outliers, or None without outliers. scale, zero:
    rounded as they are stored.
    """

    low: Array
    high: Array
    lower: Array | None
    upper: Array | None
    scale: Array
    zero: Array
    of_tokens: bool

    def clean(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x with non-finite entries replaced."""
        inside = jnp.clip(jnp.where(x == x, x, 0.0), self.low, self.high)
        return inside if self.of_tokens else jnp.where(jnp.abs(x) < jnp.inf, x, inside)

    def outliers(
        self, clean: Float[Array, "*batch rows columns"]
    ) -> Bool[Array, "*batch rows columns"]:
        assert self.lower is not None, "there are thresholds where there are outliers"
        assert self.upper is not None, "thresholds come in pairs"
        return (clean < self.lower) | (clean > self.upper)

    def of_slot(self, slot: int, slots: int) -> Ranges:
        """Return the ranges of the tokens of one slot of a span."""

        def rows(statistic: Array | None) -> Array | None:
            if statistic is None or slots == 1 or statistic.shape[0] == 1:
                return statistic
            cut = statistic.reshape(slots, SPAN // slots)
            here = lax.broadcasted_iota(jnp.int32, cut.shape, 0) == slot
            return jnp.sum(jnp.where(here, cut, 0.0), axis=0)[:, None]

        return self._replace(
            **{
                name: rows(getattr(self, name))
                for name in ("low", "high", "lower", "upper", "scale", "zero")
            }
        )


@dataclasses.dataclass(frozen=True)
class TableBlocks(BlockWriter):
    """Codes that index a table. Units are the tokens that share slots for outliers, or spans.

    Args:
        layout: of the codes.
        group: the channels of a token that share a scale and zero point, in `heads` heads. None if
            scale and zero point belong to channels.
        heads: neighbouring heads that share them.
        scale_dtype: of scales and zero points of tokens.
        slots: for outliers, if there are any.
        per_side: how many outliers are among a token's largest entries, and among its smallest. 0
            if the thresholds are inputs.

    arrays: the words of each plane set [B, K, S / n, w]; scale and zero, [B, K / heads, H / group,
    S], if they belong to tokens; with slots also the arrays of outlier_slots.py. inputs, fp32:
    levels and values [1, 1, 2^bits]; scale and zero [1, K, H] if they belong to channels; with
    outliers and without `per_side`, the thresholds, [1, K, H] of channels or [1, 1, 1] of all.
    """

    layout: PlaneLayout
    group: int | None
    heads: int = 1
    scale_dtype: str = "float16"
    slots: Slots | None = None
    per_side: int = 0

    @property
    def unit(self) -> int:
        return self.slots.tokens if self.slots else SPAN

    @property
    def run(self) -> int:
        return 1

    @property
    def warps(self) -> int:
        return 8

    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        heads, channels, p = ring.shape[1], ring.shape[3], self.layout
        if p.chunks * p.width != channels:
            raise ValueError(
                f"rows of {channels} channels do not fill {p.chunks} chunks of {p.width} channels:"
                " use the XLA path"
            )
        if self.unit % SPAN or block % self.unit:
            raise ValueError(
                f"{self.unit} tokens that share slots must be a multiple of {SPAN} and divide a"
                f" block of {block}"
            )
        if self.group is not None and (self.group % p.width or channels % self.group):
            raise ValueError(
                f"groups of {self.group} channels must be whole chunks of {p.width} and divide"
                f" {channels}"
            )
        if self.heads not in (1, heads) or (
            self.slots and self.group and self.heads * self.group != heads * channels
        ):
            raise ValueError(
                f"groups of {self.heads} heads: kernels take groups of one or of all, and of all"
                " with outliers"
            )

    def write(
        self,
        program: Any,
        head: Any,
        source: Source,
        place: Any,
        inputs: Sequence[Any],
        arrays: Sequence[Any],
    ) -> None:
        p, sets = self.layout, len(self.layout.sets)
        levels, values, *inputs = inputs
        table = LevelTable(*([ref[0, i] for i in range(1 << p.bits)] for ref in (levels, values)))
        scales, of_slots = (
            (arrays[sets : sets + 2], arrays[sets + 2 :]) if self.group else ((), arrays[sets:])
        )
        spans = range(0, self.unit, SPAN)
        ranges = [
            self._of_tokens(source, head, span, inputs) if self.group else self._of_channels(inputs)
            for span in spans
        ]
        for span, of_span in zip(spans, ranges, strict=True):
            words = CodeWriter(p, arrays[:sets], head, place + span, 0, p.width)
            for slot in range(p.slots):
                tokens = span + tokens_of_slot(p, slot, SPAN)
                for chunk in range(p.chunks):
                    columns = pl.ds(chunk * p.width, p.width)
                    of_slot = of_span(head, columns).of_slot(slot, p.slots)
                    x = of_slot.clean(source.read(head, tokens, columns))
                    words.add(slot, chunk, table.codes(x, of_slot.scale, of_slot.zero))
            words.store()
            if self.group:
                pl.when((head == 0) | (self.heads == 1))(
                    functools.partial(
                        self._store_scales, scales, of_span, head, place + span, source.channels
                    )
                )
        if self.slots:

            def residuals(head: Any, span: int) -> tuple[Array, Array]:
                whole = pl.ds(0, source.channels)
                of_span = ranges[span // SPAN](head, whole)
                clean = of_span.clean(source.read(head, span + _tokens(), whole))
                entries = table.look_up(table.codes(clean, of_span.scale, of_span.zero))
                return of_span.outliers(clean), clean - (entries * of_span.scale + of_span.zero)

            collect(
                self.slots,
                residuals,
                head,
                source.heads,
                source.channels,
                lax.div(place, self.slots.tokens),
                of_slots,
            )

    def _of_channels(self, inputs: Sequence[Any]) -> RangesOf:
        """Return the ranges of channels, which come with the parameters."""

        def ranges(head: Any, columns: Any) -> Ranges:
            scale, zero, *thresholds = (ref[head, columns][None] for ref in inputs)
            lower, upper = thresholds or (None, None)
            return Ranges(zero - scale, zero + scale, lower, upper, scale, zero, False)

        return ranges

    def _of_tokens(self, source: Source, head: Any, span: int, inputs: Sequence[Any]) -> RangesOf:
        """Return the ranges of the tokens of a span in each group of channels."""
        assert self.group is not None
        starts = range(0, source.channels, self.group)
        groups = [
            self._of_group(source, head, span, pl.ds(first, self.group), inputs) for first in starts
        ]
        return lambda head, columns: groups[columns.start // (self.group or 1)]

    def _of_group(
        self, source: Source, head: Any, span: int, columns: Any, inputs: Sequence[Any]
    ) -> Ranges:
        limit = saturation_limit(self.scale_dtype)
        none = jnp.full((SPAN,), jnp.inf), jnp.full((SPAN,), -jnp.inf)

        def over_heads(step: Callable[[Any, Any], Any], start: Any) -> Any:
            return (
                lax.fori_loop(0, source.heads, step, start) if self.heads > 1 else step(head, start)
            )

        def range_of(entries: Callable[[Any], tuple[Array, Array]]) -> list[Array]:
            """Return the least and the largest of the entries (of a head) that count, or 0 if none
            does.
            """

            def widen(head: Any, bounds: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
                x, counts = entries(head)
                low = jnp.min(jnp.where(counts, x, jnp.inf), axis=1)
                high = jnp.max(jnp.where(counts, x, -jnp.inf), axis=1)
                return jnp.minimum(bounds[0], low), jnp.maximum(bounds[1], high)

            return [
                jnp.where(jnp.abs(bound) < jnp.inf, bound, 0.0)[:, None]
                for bound in over_heads(widen, none)
            ]

        def read(head: Any) -> Float[Array, "32 columns"]:
            return source.read(head, span + _tokens(), columns)

        def finite(head: Any) -> tuple[Array, Array]:
            x = read(head)
            return jnp.clip(x, -limit, limit), jnp.abs(x) < jnp.inf

        low, high = range_of(finite)
        ranges = Ranges(low, high, None, None, low, high, True)
        if self.slots:
            thresholds = [ref[0, pl.ds(0, 1)][None] for ref in inputs]
            lower, upper = thresholds or self._innermost(
                lambda head: ranges.clean(read(head)), over_heads
            )
            ranges = ranges._replace(lower=lower, upper=upper)

            def kept(head: Any) -> tuple[Array, Array]:
                clean = ranges.clean(read(head))
                return clean, jnp.logical_not(ranges.outliers(clean))

            low, high = range_of(kept)
        low, high = (jnp.clip(bound, -limit, limit) for bound in (low, high))
        scale = stored_scale((high - low) / 2, self.scale_dtype, 2).astype(jnp.float32)
        zero = ((high + low) / 2).astype(self.scale_dtype).astype(jnp.float32)
        return ranges._replace(scale=scale, zero=zero)

    def _innermost(
        self, clean: Callable[[Any], Array], over_heads: Callable[[Any, Any], Any]
    ) -> tuple[Array, Array]:
        """Return (lower, upper), [tokens, 1], such that `per_side` entries of a token (or more, if
        some are equal) lie below lower, and as many above upper.
        """

        def largest(sign: int) -> Array:
            def next_smaller(_: Any, carry: Any) -> Any:
                bound, count = carry  # the number of entries >= bound

                def compare(head: Any, best: Any) -> Any:
                    x, (maximum, equal) = sign * clean(head), best
                    of_head = jnp.max(jnp.where(x < bound[:, None], x, -jnp.inf), axis=1)
                    new = jnp.maximum(maximum, of_head)
                    equal_here = jnp.sum((x == of_head[:, None]).astype(jnp.int32), axis=1)
                    before = jnp.where(maximum == new, equal, 0)
                    return new, before + jnp.where(of_head == new, equal_here, 0)

                maximum, equal = over_heads(
                    compare, (jnp.full((SPAN,), -jnp.inf), jnp.zeros((SPAN,), jnp.int32))
                )
                enough = count > self.per_side
                return jnp.where(enough, bound, maximum), jnp.where(enough, count, count + equal)

            start = jnp.full((SPAN,), jnp.inf), jnp.zeros((SPAN,), jnp.int32)
            return lax.fori_loop(0, self.per_side + 1, next_smaller, start)[0][:, None]

        return -largest(-1), largest(1)

    def _store_scales(
        self, refs: Sequence[Any], of_span: RangesOf, head: Any, place: Any, channels: int
    ) -> None:
        assert self.group is not None
        for number, first in enumerate(range(0, channels, self.group)):
            of_group = of_span(head, pl.ds(first, self.group))
            for ref, statistic in zip(refs, (of_group.scale, of_group.zero), strict=True):
                at = head if self.heads == 1 else 0, number, pl.ds(place, SPAN)
                ref[at] = statistic[:, 0].astype(ref.dtype)


def _tokens() -> Int[Array, " 32"]:
    """Return the tokens of a span as an index, which may wrap in the ring."""
    return lax.broadcasted_iota(jnp.int32, (SPAN,), 0)
