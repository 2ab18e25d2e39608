"""Descriptions of the arrays that codecs store, as the C++ kernels take them, or the reason why
they cannot read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpu_kernels.body import MAX_CHANNELS, RUN_WIDTHS, Affine, Body
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.arrays.float_array import FloatFormat
from kvq_jax.arrays.grouped_array import GroupFormat
from pallas_kernels.tiles.layout import PlaneLayout

MAX_BITS = 9
MAX_POLAR_BITS = 12
LANES = 16  # of the widest vectors


def grouped(format: GroupFormat, *, pre_rope: bool = False) -> Body | str:
    """Describe uniformly quantized groups, or say in one line why kernels cannot read them."""
    if reason := _unsupported(format.layout, pre_rope=pre_rope):
        return reason
    over_tokens = format.axis == "tokens"
    return _body(
        format.layout,
        "token groups" if over_tokens else "channel groups",
        format.group_size,
        heads=1 if over_tokens else format.heads,
        scale_dtype=format.scale_dtype,
        centre=None if format.stores_zero else format.centre,
        rotated=pre_rope,
    )


def codebook(
    layout: PlaneLayout,
    group: ChannelGroup | None,
    *,
    scale_dtype: str = "float16",
    pool: int = 0,
    pre_rope: bool = False,
    residual_dtype: str = "float16",
) -> Body | str:
    """Describe codes that index one table, or say in one line why kernels cannot read them.
    Arguments: `kernel_readers.codebook`, and the dtype of outliers."""
    if reason := _unsupported(layout, pre_rope=pre_rope):
        return reason
    if layout.bits > 4:
        return f"{layout.bits}-bit codes; CPU kernels look up tables for up to 4 bits"
    options = {"table": True, "pool": pool, "residual_dtype": residual_dtype, "rotated": pre_rope}
    if group is None:
        return _body(layout, "channels", 1, scale_dtype="float32", **options)
    return _body(
        layout,
        "channel groups",
        group.channels,
        heads=group.heads,
        scale_dtype=scale_dtype,
        **options,
    )


def polar(
    layout: PlaneLayout,
    angle_bits: int,
    group: int,
    scale_dtype: str,
    *,
    grouped_angles: bool,
    root: bool,
) -> Body | str:
    """Describe keys in polar form, or say in one line why kernels cannot read them.

    root: radii are the squares of the stored numbers. Other arguments: `kernel_readers.polar`.
    """
    if not grouped_angles:
        return (
            "one step of the radii for a whole sequence; CPU kernels read radii in groups of tokens"
        )
    if reason := _unsupported(layout, max_bits=MAX_POLAR_BITS):
        return reason
    return _body(
        layout,
        "token groups",
        group,
        scale_dtype=scale_dtype,
        form="polar",
        angle_bits=angle_bits,
        root=root,
    )


def floats(format: FloatFormat, *, pre_rope: bool = False) -> Body | str:
    """Describe small floats, or say in one line why kernels cannot read them. Those of 4 bits are
    looked up in a table."""
    layout = format.layout
    if reason := _unsupported(layout, pre_rope=pre_rope):
        return reason
    if format.scale == "none":
        return _body(layout, "channels", 1, form="floats", rotated=pre_rope)
    return _body(
        layout,
        "channel groups",
        format.group,
        scale_dtype=format.scale,
        centre=0,
        table=True,
        rotated=pre_rope,
    )


def rows(channels: int, dtype: str) -> Body | str:
    """Describe rows in full precision, or say in one line why kernels cannot read them."""
    if channels > MAX_CHANNELS:
        return f"head_dim {channels}; CPU kernels serve up to {MAX_CHANNELS}"
    return _without_codes(channels, 1, form="rows", scale_dtype=dtype)


def _without_codes(channels: int, span: int, **options: Any) -> Body:
    """Describe a body that has no plane sets of codes of one width."""
    return Body(
        bits=0,
        low_bits=0,
        channels=channels,
        chunks=-(-channels // LANES),
        width=LANES,
        slots=1,
        span=span,
        affine="channels",
        group=1,
        **options,
    )


def runs(
    layouts: Sequence[PlaneLayout], channels: int, *, pre_rope: bool, synthesis: bool = False
) -> Body | str:
    """Describe rows in runs of channels of one width, or say in one line why kernels cannot read
    them.

    synthesis: keys that a matrix makes of their channels.
    """
    if channels > MAX_CHANNELS:
        return f"head_dim {channels}; CPU kernels serve up to {MAX_CHANNELS}"
    padded = next(
        (layout for layout in layouts if layout.chunks != 1 or layout.width != layout.channels),
        None,
    )
    if padded:
        return (
            f"{padded.bits}-bit runs that are padded; CPU kernels read those of blocks whose tokens"
            " fill whole words"
        )
    stored = [0] * RUN_WIDTHS
    for layout in layouts:
        stored[layout.bits - 1] = layout.channels
    return _without_codes(
        channels,
        layouts[0].span,
        form="runs",
        rotated=pre_rope,
        synthesis=synthesis,
        run_channels=tuple(stored),
    )


def _unsupported(
    layout: PlaneLayout, *, pre_rope: bool = False, max_bits: int = MAX_BITS
) -> str | None:
    if pre_rope and layout.channels % 2:
        return f"keys before RoPE of {layout.channels} channels, which are not pairs"
    if layout.channels > MAX_CHANNELS:
        return f"head_dim {layout.channels}; CPU kernels serve up to {MAX_CHANNELS}"
    if layout.bits > max_bits or len(layout.sets) > 2:
        return (
            f"{layout.bits}-bit codes; CPU kernels unpack those of up to {max_bits} bits in two"
            " plane sets"
        )
    return None


def _body(layout: PlaneLayout, affine: Affine, group: int, **options: Any) -> Body:
    p = layout
    return Body(
        p.bits, p.sets[0], p.channels, p.chunks, p.width, p.slots, p.span, affine, group, **options
    )
