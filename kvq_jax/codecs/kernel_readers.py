"""Readers for the arrays that codecs store, as `pallas_kernels.readers` defines them, or the reason
why a kernel cannot read them.

Readers are imported inside functions: what XLA alone runs needs none of Pallas.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.grouped_array import GroupFormat
from pallas_kernels.readers.base import Reader
from pallas_kernels.tiles.layout import SPAN, SUPPORTED_BITS, TABLE_BITS, PlaneLayout

HEAD_DIMS = (64, 128, 256)
# by head dim. Others take a minute to compile, or spill (docs/kernels.md).
POLAR_BITS = {64: (4, 6, 8), 128: (4, 6, 8), 256: (8,)}
# Kernels compute with this dtype: bfloat16 has numbers that it does not hold, and float32 more
# digits.
SCALE_DTYPE = "float16"
RUN_HEAD_DIMS = (64, 128)  # at 256 a step spills, and compiles for minutes (docs/kernels.md)
RUN_CHANNELS = 8  # two runs share the 16 that tensor cores sum over
# powers of two, like all sizes in a kernel, from a span to the longest step
TOKEN_GROUPS = (32, 64, 128)


def grouped(format: GroupFormat, *, pre_rope: bool = False) -> Reader | str:
    """Return the reader of uniformly quantized groups, or one line with the reason for none."""
    layout = format.layout
    if reason := head_dim_unsupported(format.channels) or scales_unsupported(format.scale_dtype):
        return reason
    if format.code_bits not in SUPPORTED_BITS:
        return (
            f"{format.code_bits}-bit codes; kernels unpack {', '.join(map(str, SUPPORTED_BITS))}"
            " bits"
        )
    if format.block % SPAN:
        return f"blocks of {format.block} tokens; kernels read spans of {SPAN}"
    if format.axis == "channels" and format.group_size % layout.width:
        return f"groups of {format.group_size} channels are not whole planes of {layout.width}"
    if format.axis == "tokens" and format.group_size not in TOKEN_GROUPS:
        return (
            f"groups of {format.group_size} tokens; kernels serve"
            f" {', '.join(map(str, TOKEN_GROUPS))}"
        )
    from pallas_kernels.readers.grouped import GroupedReader

    reader = GroupedReader(
        layout,
        format.axis,
        format.group_size,
        None if format.stores_zero else format.centre,
        format.scale_dtype,
    )
    return rotated(reader) if pre_rope else reader


def codebook(
    layout: PlaneLayout,
    group: ChannelGroup | None,
    *,
    scale_dtype: str = "float16",
    pool: int = 0,
    pre_rope: bool = False,
) -> Reader | str:
    """Return the reader of codes that index one table, or one line with the reason for none.

        x^ = table[code] * scale + zero (+ residual)

    Args:
        layout: the layout of the codes.
        group: the channels that share the scale and zero point of a token. None if each channel has
            its own, the same for all tokens.
        scale_dtype: the dtype of stored scales and zero points.
        pool: the tokens that share slots for outliers, 0 for no outliers.
        pre_rope: True if keys are cached before RoPE.

    The reader takes these arrays, in this order: words of each plane set [B, K, S / n, w]; table
    [2^bits]; scale and zero, [K, H] without a group, else as stored, [B, K / heads, H / channels,
    S]; with outliers their index and residual, [B, S / pool, P], and the ends of heads among them,
    [B, S / pool, K].
    """
    if reason := head_dim_unsupported(layout.channels) or (
        scales_unsupported(scale_dtype) if group or pool else None
    ):
        return reason
    if layout.bits not in TABLE_BITS:
        return (
            f"{layout.bits}-bit codes; kernels look up tables for {', '.join(map(str, TABLE_BITS))}"
            " bits"
        )
    if layout.span % SPAN:
        return f"blocks that are not a multiple of {SPAN} tokens; kernels read spans of {SPAN}"
    if group is not None and group.channels % layout.width:
        return f"groups of {group.channels} channels are not whole planes of {layout.width}"
    if pool and pool not in TOKEN_GROUPS:
        return (
            f"outliers of {pool} tokens share slots; kernels read those of"
            f" {', '.join(map(str, TOKEN_GROUPS))}"
        )
    affine = "channels" if group is None else "tokens"
    channels = layout.channels if group is None else group.channels
    from pallas_kernels.readers.codebook import CodebookReader

    reader = CodebookReader(layout, affine, channels, scale_dtype, pool)
    return rotated(reader) if pre_rope else reader


def rotated(reader: Reader) -> Reader | str:
    """Return the reader of the same keys cached before RoPE, or one line with the reason for none.
    The caller fills in the sink."""
    from pallas_kernels.readers.rotary import RotatedReader

    chunks, width = reader.chunks
    if chunks % 2:
        return f"the halves of a head are not whole planes of {width} channels"
    return RotatedReader(reader)


def polar(
    layout: PlaneLayout, angle_bits: int, group_size: int, scale_dtype: str, *, grouped_angles: bool
) -> Reader | str:
    """Return the reader of keys in polar form, or one line with the reason for none.

    It takes the words of each plane set, of the codes of H / 2 pairs, then step and least value of
    the radii, and of the angles, [B, K, S / group, H / 2].
    """
    if not grouped_angles:
        return "one step of the radii for a whole sequence; kernels read radii in groups of tokens"
    if reason := head_dim_unsupported(2 * layout.channels) or scales_unsupported(scale_dtype):
        return reason
    if layout.span % SPAN or group_size not in TOKEN_GROUPS:
        return f"groups of {group_size} tokens; kernels serve {', '.join(map(str, TOKEN_GROUPS))}"
    served = POLAR_BITS[2 * layout.channels]
    if layout.bits not in served:
        return (
            f"{layout.bits} bits for a pair at head_dim {2 * layout.channels}; kernels serve"
            f" {', '.join(map(str, served))}"
        )
    from pallas_kernels.readers.polar import PolarReader

    return PolarReader(layout, angle_bits, group_size, scale_dtype)


def runs(
    layouts: Sequence[PlaneLayout], channels: int, *, pre_rope: bool, synthesis: bool = False
) -> Reader | str:
    """Return the reader of keys before RoPE, or of values, in runs of channels of one width, or one
    line with the reason for none.

    synthesis: keys that a matrix makes of their channels.
    """
    if channels not in RUN_HEAD_DIMS:
        return (
            f"runs of channels at head_dim {channels}; kernels read them at"
            f" {' and '.join(map(str, RUN_HEAD_DIMS))}"
        )
    if layouts[0].span % SPAN:
        return f"blocks that are not a multiple of {SPAN} tokens; kernels read spans of {SPAN}"
    odd = next((layout for layout in layouts if layout.channels % RUN_CHANNELS), None)
    if odd:
        return (
            f"a run of {odd.channels} channels of {odd.bits} bits; kernels read runs of a multiple"
            f" of {RUN_CHANNELS} channels"
        )
    from pallas_kernels.readers.eigen_keys import EigenKeys
    from pallas_kernels.readers.runs import RunsKeys, RunsValues

    keys = EigenKeys if synthesis else RunsKeys
    return (keys if pre_rope else RunsValues)(tuple(layouts), channels)


def dense(channels: int, dtype: str) -> Reader | str:
    """Return the reader of full-precision rows, or one line with the reason for none."""
    if dtype not in ("bfloat16", "float16"):
        return f"full-precision rows in {dtype}; kernels read bfloat16 and float16"
    from pallas_kernels.readers.dense import DenseReader

    return head_dim_unsupported(channels) or DenseReader(channels, dtype)


def head_dim_unsupported(channels: int) -> str | None:
    """Return the reason why kernels do not serve a head dim, in one line, or None if they do."""
    if channels in HEAD_DIMS:
        return None
    return f"head_dim {channels}; kernels serve {', '.join(map(str, HEAD_DIMS))}"


def scales_unsupported(dtype: str) -> str | None:
    """Return the reason why kernels do not serve scales and zero points of this dtype, in one line,
    or None if they do."""
    if dtype == SCALE_DTYPE:
        return None
    return f"scales in {dtype}; kernels compute with {SCALE_DTYPE}"
