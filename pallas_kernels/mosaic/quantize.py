"""Quantize rows into uniform groups on Mosaic GPU, by the equations of quantize/kernel.py.

Each warp quantizes a span of tokens. All numbers of a span that share a word lie in the same place
of the same lane (registers.LANES), so codes are packed in registers, and the range of a group is
found by the lanes of one warp. There is one path for all rows: non-finite entries are replaced
everywhere, where Triton's kernels branch.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# types are checked with JAX 0.10, whose Mosaic GPU is older

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.matrices import in_lanes
from pallas_kernels.mosaic.registers import WARPS
from pallas_kernels.mosaic.ring import RingRows
from pallas_kernels.mosaic.rows import Rows
from pallas_kernels.mosaic.stripes import entry
from pallas_kernels.quantize.rounding import Job, Quantizer, cleaned, finite_or, fold, within_limit
from pallas_kernels.quantize.words import LevelWriter
from pallas_kernels.tiles.layout import SPAN, PlaneLayout


class _Job(Job):
    """The arithmetic of a job in operations that Mosaic GPU has."""

    def _scale(self, scale: jax.Array) -> jax.Array:
        return stored_scale(scale, self.reader.scale_dtype, self.reach)


def stored_scale(scale: jax.Array, dtype: str, steps: int) -> jax.Array:
    """Return pallas_kernels.stored_scales.stored_scale in fp32, with a ceiling made of a
    rounding."""
    if dtype == "float16":
        normal, minimum = 2.0**-14, 2.0**-24
        units = scale / minimum
        whole = lax.round(units, lax.RoundingMethod.TO_NEAREST_EVEN)
        above = jnp.where(whole < units, whole + 1, whole) * minimum
        small = jnp.where(scale * steps < minimum / 2, 0.0, above)
        scale = jnp.where(scale < normal, small, scale)
    return scale.astype(dtype).astype(jnp.float32)


class Spans(NamedTuple):
    """Neighbouring spans of one head, one for each warp, or a single one for all.

    Args:
        rows: [tokens, H], whose first row is the first token of the first span, or `RingRows`.
        divisor: [1, H], or None.
        words: of each plane set, [rows of words, words], whose first row is the first span's.
        scales: the scales, and the zero points if there are any: [H / group, tokens], whose first
            token is the first span's, or [groups, H], whose first group is.
    """

    rows: Any
    divisor: Any
    words: Sequence[Any]
    scales: Sequence[Any]


def quantize_spans(spans: Spans, job: Job, stride: int, interpret: bool) -> None:
    """Quantize a span for each warp, or the same one in all of them.

    Args:
        stride: SPAN if neighbouring warps quantize neighbouring spans, 0 if all have the same.
    """
    fields: dict[str, Any] = {f.name: getattr(job, f.name) for f in dataclasses.fields(Job)}
    fields["asm"] = False
    access = SpanAccess(spans, job.reader.layout, stride, interpret)
    work = _Work(access, _Job(**fields))
    work.over_tokens() if job.reader.axis == "tokens" else work.over_channels()


@dataclasses.dataclass(frozen=True)
class SpanAccess:
    """Loads and stores of spans, for codes of a layout."""

    spans: Spans
    layout: PlaneLayout
    stride: int
    interpret: bool

    @property
    def run(self) -> int:
        """Return the tokens of a slot."""
        return SPAN // self.layout.slots

    @property
    def reach(self) -> int:
        """Return the tokens from the first warp's slot to the end of the last warp's."""
        return self.stride * (WARPS - 1) + self.run

    def rows(self, per: int) -> Rows:
        """Return the operations on rows of arrays that have one row for `per` tokens."""
        return Rows(self.interpret, self.stride // per)

    def columns(self, chunk: int) -> Any:
        return pl.ds(chunk * self.layout.width, self.layout.width)

    def load(self, slot: int, chunk: int) -> jax.Array:
        """Load the rows of a slot's tokens and a chunk of channels, in fp32."""
        first, columns = slot * self.run, self.columns(chunk)
        if isinstance(self.spans.rows, RingRows):
            x = self.spans.rows.load(self.rows(1), first, self.run, columns)
        else:
            of_slot = self.spans.rows.at[pl.ds(first, self.reach), columns]
            x = self.rows(1).load(of_slot, self.run)
        x = x.astype(jnp.float32)
        if self.spans.divisor is None:
            return x
        once = Rows(self.interpret, 0)
        return x * (1.0 / once.load(self.spans.divisor.at[:, columns], self.run))

    def words(self) -> LevelWriter:
        rows = self.rows(self.layout.slots)
        reach = rows.stride * (WARPS - 1) + self.run

        def store(plane_set: int, tile: int, word: jax.Array) -> None:
            at = pl.ds(0, reach), self.columns(tile)
            rows.store(self.spans.words[plane_set].at[at], word)

        return LevelWriter(self.layout, store)

    def groups(self, channels: int) -> list[tuple[int, int, range]]:
        """Return the slot, the number and the chunks of each group of `channels`, in the
        order of tiles, so that few words are open at a time."""
        per_group = channels // self.layout.width
        units = [
            (slot, group, range(group * per_group, (group + 1) * per_group))
            for slot in range(self.layout.slots)
            for group in range(self.layout.chunks // per_group)
        ]
        return sorted(units, key=lambda unit: self.layout.field(unit[0], unit[2].start).tile)

    def store_scales(self, slot: int, group: int, scales: Sequence[jax.Array]) -> None:
        """Store the first columns of scales, and of zero points, of a slot's tokens."""
        for ref, x in zip(self.spans.scales, scales, strict=False):
            at = group, pl.ds(slot * self.run, self.reach)
            self.rows(1).store_column(ref.at[at], x.astype(ref.dtype))


@dataclasses.dataclass(frozen=True)
class _Work:
    access: SpanAccess
    job: Job

    def over_channels(self) -> None:
        """Quantize groups of channels, one after the other, as `channel_kernel` does."""
        words = self.access.words()
        for slot, group, chunks in self.access.groups(self.job.reader.group):
            tiles = [self.access.load(slot, c) for c in chunks]
            quantizer, clean = _quantizer_of(tiles, self.job, 2)
            for c, x in zip(chunks, tiles, strict=True):
                words.add(slot, c, self.job.levels(clean(x), quantizer))
            self.access.store_scales(slot, group, (quantizer.scale, quantizer.zero))

    def over_tokens(self) -> None:
        """Quantize groups of the tokens of a span, one chunk of channels after the other. All words
        of the span stay open meanwhile, which take fewer registers than quantizers of all
        channels."""
        access, words = self.access, self.access.words()
        rows, slots = access.rows(SPAN), range(access.layout.slots)
        for c in range(access.layout.chunks):
            tiles = [access.load(slot, c) for slot in slots]
            quantizer, clean = _quantizer_of(tiles, self.job, 1)
            scales = quantizer.scale, quantizer.zero
            for ref, x in zip(access.spans.scales, scales, strict=False):
                at = pl.ds(0, rows.stride * (WARPS - 1) + 1), access.columns(c)
                rows.store(ref.at[at], x.astype(ref.dtype), 1)
            for slot, x in zip(slots, tiles, strict=True):
                words.add(slot, c, self.job.levels(clean(x), quantizer))


def _quantizer_of(
    tiles: Sequence[jax.Array], job: Job, axis: int
) -> tuple[Quantizer, Callable[[jax.Array], jax.Array]]:
    """Return the quantizers of groups along an axis of the tiles, and what replaces non-finite
    entries by entries of their group's range."""

    def reduced(operation: Any, pairwise: Any, tiles: Sequence[jax.Array]) -> jax.Array:
        whole = operation(fold(pairwise, tiles), axis=axis)
        return in_lanes(lax.broadcast_in_dim(whole, tiles[0].shape, (0, 3 - axis)))

    def bound(operation: Any, pairwise: Any, other: float) -> jax.Array:
        found = reduced(operation, pairwise, [finite_or(x, other) for x in tiles])
        return within_limit(found, job.limit)

    low = bound(jnp.min, jnp.minimum, np.inf)
    high = bound(jnp.max, jnp.maximum, -np.inf)
    clean = functools.partial(cleaned, low=low, high=high)
    schemes = job.schemes(low, high)
    if len(schemes) == 1:
        return schemes[0], clean
    finite = [clean(x) for x in tiles]
    asym, sym = (
        reduced(jnp.sum, jnp.add, [job.error(x, job.levels(x, one), one) for x in finite])
        for one in schemes
    )
    chosen = (jnp.where(asym > sym, s, a) for a, s in zip(*schemes, strict=True))
    return Quantizer(*chosen), clean


def packed(
    rows: jax.Array,
    divisor: jax.Array | None,
    outputs: Sequence[jax.ShapeDtypeStruct],
    job: Job,
    interpret: Any = None,
) -> Sequence[jax.Array]:
    """Return the words, the scales and the zero points of rows [B, K, T, H], as
    `kernel.quantize_rows` does.

    Args:
        divisor: [B, K, 1, H], fp32. B and K may be 1.
        outputs: the shapes and dtypes.
        job: of all rows.
    """
    batch, heads, tokens, _ = rows.shape
    layout, sets = job.reader.layout, len(job.reader.layout.sets)
    stride = SPAN if tokens >= WARPS * SPAN else 0
    reach = WARPS * SPAN if stride else SPAN
    inputs = [rows] if divisor is None else [rows, divisor]

    def quantize(*refs: Any) -> None:
        unit = lax.axis_index("row"), lax.axis_index("head")
        # The last block moves back, and writes the numbers of some spans again.
        first = jnp.minimum(lax.axis_index("tokens") * reach, tokens - reach)
        row_ref, *more = refs[: len(inputs)]
        out = refs[len(inputs) :]

        def part(per: int) -> Any:
            return pl.ds(lax.div(first, jnp.int32(per)), max(1, reach // per))

        if job.reader.axis == "tokens":
            scales = [ref.at[(*unit, part(SPAN))] for ref in out[sets:]]
        else:
            scales = [ref.at[(*unit, slice(None), part(1))] for ref in out[sets:]]
        words = [ref.at[(*unit, part(layout.slots))] for ref in out[:sets]]
        factors = more[0].at[entry(more[0], unit)] if more else None
        spans = Spans(row_ref.at[(*unit, part(1))], factors, words, scales)
        quantize_spans(spans, job, stride, bool(interpret))

    call = plgpu.kernel(
        quantize,
        out_type=tuple(outputs),
        grid=(batch, heads, -(-tokens // reach)),
        grid_names=("row", "head", "tokens"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    with jax.enable_x64(False):
        return call(*inputs)
