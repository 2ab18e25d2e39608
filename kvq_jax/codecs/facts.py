"""Facts about a codec that the library may rely on. Each is declared here and checked by a law over
the table of methods, so that nobody has to look at a codec's class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int

from kvq_jax.arrays.packing import PlaneLayout
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.types.array_types import Axis, CachedRows, Tree

Form = Literal["vectors", "before_rope", "other"]


class OutlierCounts(NamedTuple):
    """The outliers with a slot and without one, in each of n runs of S / n neighbouring tokens.

    A block is whole runs.
    """

    kept: Int[Array, "B n"]
    dropped: Int[Array, "B n"]


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Outliers that the body stores at places that the data choose.

    slots: the slots of a token over K heads, a mean if tokens share slots.
    counts: the outliers that a body, as `Codec.quantize` returns it, kept and dropped.
    """

    slots: Callable[[int], float]
    counts: Callable[[Tree], OutlierCounts]


@dataclasses.dataclass(frozen=True)
class CrossLayer:
    """The way in which a codec builds on the layers below it: it stores differences from an
    accumulator [B, S, D] over the body's tokens, which flows through the layers as `carry`.

    `body` holds quantized differences. Attention reads the accumulator as it is after this layer,
    so `scores` and `weighted` get a chunk of it in place of the body.

    starts: True in the base layer, which starts the accumulator instead of taking one.
    flops: the cost of adding one token's differences to the accumulator. A multiply-add counts as
        two.
    accumulator: (batch, tokens) -> the description of the array.
    expected: (params, accumulator [B, T, D]) -> the rows that the layers below predict, fp32. They
        are subtracted before quantization and added after dequantization.
    accumulated: (params, accumulator, differences) -> the accumulator with this layer's dequantized
        differences added, fp32. The base layer adds to a scalar 0.
    """

    starts: bool
    flops: int
    accumulator: Callable[[int, int], BodySpec]
    expected: Callable[[Tree, Float[Array, "B T D"]], CachedRows]
    accumulated: Callable[
        [Tree, Float[Array, "B T D"] | Float[Array, ""], CachedRows], Float[Array, "B T D"]
    ]


@dataclasses.dataclass(frozen=True)
class PaperCount:
    """Bits and bytes as the method's paper counts them. None if its rule does not cover this codec.

    bits: (KV width, context, with pointers) -> average bits of an element, by the KVQuant paper's
        rule (cache/paper_bits.py).
    bytes: elements -> bytes in the layout that the paper counts with, if it is not the one here.
    """

    bits: Callable[[int, int, bool], float] | None = None
    bytes: Callable[[int], int] | None = None


class TokenGroup(NamedTuple):
    """Codes of one channel, or of one RoPE pair, over neighbouring tokens.

    bits: of a code.
    tokens: how many share a range. inf: all tokens of a sequence.
    """

    bits: int
    tokens: float


def one_row_a_head(heads: int, head_dim: int) -> tuple[Axis, Axis]:
    """Describe rows of H channels for each of K heads."""
    return Axis("kv_heads", heads), Axis("channels", head_dim)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about one side of one layer, for the options that its codec was made with.

    exact: the body holds rows in full precision, so nothing is quantized.
    form: the form of cached rows. "vectors": keys after RoPE, or values. "before_rope": keys that
        `Codec.vectors` rotates to their positions, with no other change. "other": anything else.
    joint: both sides share one body, its windows and one tree of parameters, which the codec of the
        key side handles.
    rebuilds: True if keys and values are rebuilt from rows with the layer's weights.
    cross_layer: how the codec builds on the layer below, or None.
    row_axes: (K, H) -> the axes of a token's cached rows, heads and channels.
    couples: "rows" if the codes of a batch row depend on other rows of its batch, "heads" if the
        codes of a KV head depend on other heads although each has its own arrays.
    code_layout: the layout of packed codes, or None if the body packs none in planes.
    channel_group_bits: bits of codes in groups of the model's own channels, or None. The channels
        of a group share a token's scale, so one with a large constant makes all of them coarse.
    mantissa_bits: the mantissa bits of codes that are floats without a scale of a token, or None. A
        constant c in a channel is rounded in steps of up to |c| / 2^mantissa_bits.
    token_group: the group of tokens of a channel or pair that share a range, or None. A constant in
        a pair that RoPE turns within the group widens the range.
    normalizes_channels: rows are divided by a norm of each channel before they are quantized.
    requantizes: "exact" if rows that the body gives back are quantized to themselves, to the
        rounding of scales. "drifts" if each pass changes them: errors would add up if `trim`
        did not keep codes (layer/kept_codes.py).
    outliers: the slots for outliers, or None.
    unmet: K -> an option that a layer with K KV heads is too small for, with a remedy in one line.
        None if there is none.
    paper: how the paper counts.
    """

    exact: bool = False
    form: Form = "vectors"
    joint: bool = False
    rebuilds: bool = False
    cross_layer: CrossLayer | None = None
    row_axes: Callable[[int, int], tuple[Axis, Axis]] = one_row_a_head
    couples: frozenset[Literal["rows", "heads"]] = frozenset()
    code_layout: PlaneLayout | None = None
    channel_group_bits: int | None = None
    mantissa_bits: int | None = None
    token_group: TokenGroup | None = None
    normalizes_channels: bool = False
    requantizes: Literal["exact", "drifts"] = "exact"
    outliers: Outliers | None = None
    unmet: Callable[[int], str | None] | None = None
    paper: PaperCount = PaperCount()

    @property
    def stores_rows(self) -> bool:
        """True if the body is one array of cached rows as they are, in the windows' dtype."""
        return self.exact and self.form == "vectors"

    def row_width(self, heads: int, head_dim: int) -> int:
        """Return the channels of a token's cached rows, its heads together."""
        return math.prod(axis.size for axis in self.row_axes(heads, head_dim))

    def outlier_slots(self, heads: int) -> float:
        """Return the slots for outliers of a token, over its K heads."""
        return self.outliers.slots(heads) if self.outliers else 0
