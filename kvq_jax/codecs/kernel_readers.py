"""Readers for the arrays that codecs store, as `pallas_kernels.readers` defines them, or the reason why a kernel cannot read them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvq_jax.arrays.grouped_array import GroupFormat
from kvq_jax.arrays.packing import PlaneLayout
from pallas_kernels.readers.base import Side
from pallas_kernels.readers.codebook import Codebook
from pallas_kernels.readers.dense import Dense
from pallas_kernels.readers.grouped import Grouped
from pallas_kernels.readers.polar import Polar
from pallas_kernels.readers.rotary import Rotated
from pallas_kernels.tiles.layout import SUPPORTED_BITS, Planes
from pallas_kernels.tiles.table_lookup import BITS as TABLE_BITS
from pallas_kernels.tiles.tile import SPAN

HEAD_DIMS = (64, 128, 256)
POLAR_BITS = {64: (4, 6, 8), 128: (4, 6, 8), 256: (8,)}  # by head dim; what else compiles takes a minute to, or spills (docs/kernels.md)
TOKEN_GROUPS = (32, 64, 128)  # powers of two, as all that a kernel holds, from a span to the longest step


@runtime_checkable
class StoredGroup(Protocol):
    """What is looked at of a `ChannelGroup`: the channels of a head that share a statistic."""

    @property
    def heads(self) -> int: ...
    @property
    def channels(self) -> int: ...


@runtime_checkable
class StoredGroups(Protocol):
    """What is looked at of a `GroupedCodec`."""

    @property
    def format(self) -> GroupFormat: ...
    @property
    def pre_rope(self) -> bool: ...


def grouped(codec: StoredGroups) -> Side | str:
    """The side of uniformly quantized groups, or one line that says why there is none."""
    format, layout = codec.format, codec.format.layout
    if reason := head_dim_unsupported(format.channels):
        return reason
    if format.code_bits not in SUPPORTED_BITS:
        return f"{format.code_bits}-bit codes; kernels unpack {', '.join(map(str, SUPPORTED_BITS))} bits"
    if format.block % SPAN:
        return f"blocks of {format.block} tokens; kernels read spans of {SPAN}"
    if format.axis == "channels" and format.group_size % layout.plane:
        return f"groups of {format.group_size} channels are not whole planes of {layout.plane}"
    if format.axis == "tokens" and format.group_size not in TOKEN_GROUPS:
        return f"groups of {format.group_size} tokens; kernels serve {', '.join(map(str, TOKEN_GROUPS))}"
    side = Grouped(planes_of(layout), format.axis, format.group_size, None if format.stores_zero else format.centre, format.scale_dtype)
    return rotated(side) if codec.pre_rope else side


def nonuniform(
    layout: PlaneLayout, group: StoredGroup | None, *, scale_dtype: str = "float16", slots: int = 0, pre_rope: bool = False
) -> Side | str:
    """The side of codes that stand for the entries of one table: x^ = table[code] * scale + zero (+ residual), or one line that says why
    there is none.

    group: whose scale and zero are stored for each token; None where they belong to channels, the same for all tokens. slots: exact entries
    of a token's whole KV width, 0 without. The arrays, in this order: words of each plane set [B, K, S / n, w]; table [2^bits]; scale and
    zero, [K, H] without a group, else as stored, [B, K / heads, H / channels, S]; with slots their index and residual, [B, slots, S].
    """
    if reason := head_dim_unsupported(layout.channels):
        return reason
    if layout.bits not in TABLE_BITS:
        return f"{layout.bits}-bit codes; kernels look up tables for {', '.join(map(str, TABLE_BITS))} bits"
    if layout.span % SPAN:
        return f"blocks that are no multiple of {SPAN} tokens; kernels read spans of {SPAN}"
    if group is not None and group.channels % layout.plane:
        return f"groups of {group.channels} channels are not whole planes of {layout.plane}"
    affine, channels = ("channels", layout.channels) if group is None else ("tokens", group.channels)
    side = Codebook(planes_of(layout), affine, channels, scale_dtype, slots)
    return rotated(side) if pre_rope else side


def rotated(side: Side) -> Side | str:
    """The side of the same keys, cached before RoPE; or one line that says why there is none. The sink is for the caller to fill in."""
    chunks, width = side.chunks
    return f"the halves of a head are not whole planes of {width} channels" if chunks % 2 else Rotated(side)


def polar(layout: PlaneLayout, angle_bits: int, group_size: int, scale_dtype: str, *, grouped_angles: bool) -> Side | str:
    """The side of keys in polar form, or one line that says why there is none. The arrays: words of each plane set, of the codes of H / 2
    pairs; then step and least of the radii, and of the angles, [B, K, S / group, H / 2]."""
    if not grouped_angles:
        return "one step of the radii for a whole sequence; kernels read radii in groups of tokens"
    if reason := head_dim_unsupported(2 * layout.channels):
        return reason
    if layout.span % SPAN or group_size not in TOKEN_GROUPS:
        return f"groups of {group_size} tokens; kernels serve {', '.join(map(str, TOKEN_GROUPS))}"
    served = POLAR_BITS[2 * layout.channels]
    if layout.bits not in served:
        return f"{layout.bits} bits for a pair at head_dim {2 * layout.channels}; kernels serve {', '.join(map(str, served))}"
    return Polar(planes_of(layout), angle_bits, group_size, scale_dtype)


def planes_of(layout: PlaneLayout) -> Planes:
    return Planes(layout.bits, layout.channels, layout.chunks, layout.plane, layout.slots)


def dense(channels: int, dtype: str) -> Side | str:
    """The side of exact rows, or one line that says why there is none."""
    if dtype not in ("bfloat16", "float16"):
        return f"exact rows in {dtype}; kernels read bfloat16 and float16"
    return head_dim_unsupported(channels) or Dense(channels, dtype)


def head_dim_unsupported(channels: int) -> str | None:
    return None if channels in HEAD_DIMS else f"head_dim {channels}; kernels serve {', '.join(map(str, HEAD_DIMS))}"
