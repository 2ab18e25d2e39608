"""Descriptions of the arrays that codecs store, as the C++ kernels take them, or the reason why they cannot read them."""

from __future__ import annotations

from typing import Any

from cpu_kernels.body import Affine, Body
from kvq_jax.arrays.channel_groups import ChannelGroup
from kvq_jax.codecs.kernel_readers import StoredGroups
from pallas_kernels.tiles.layout import PlaneLayout

MOST_CHANNELS = 1024
MOST_BITS = 9


def grouped(codec: StoredGroups) -> Body | str:
    """Describe uniformly quantized groups, or say in one line why kernels cannot read them."""
    format = codec.format
    if reason := _unsupported(format.layout, pre_rope=codec.pre_rope):
        return reason
    over_tokens = format.axis == "tokens"
    return _body(
        format.layout,
        "token groups" if over_tokens else "channel groups",
        format.group_size,
        heads=1 if over_tokens else format.heads,
        scale_dtype=format.scale_dtype,
        centre=None if format.stores_zero else format.centre,
    )


def nonuniform(
    layout: PlaneLayout, group: ChannelGroup | None, *, scale_dtype: str = "float16", pool: int = 0, pre_rope: bool = False
) -> Body | str:
    """Describe codes that index one table, or say in one line why kernels cannot read them. Arguments: `kernel_readers.nonuniform`."""
    if reason := _unsupported(layout, pre_rope=pre_rope):
        return reason
    if layout.bits > 4:
        return f"{layout.bits}-bit codes; CPU kernels look up tables for up to 4 bits"
    if pool:
        return "outliers are stored beside the codes, which no CPU kernel adds"
    if group is None:
        return _body(layout, "channels", 1, scale_dtype="float32", table=True)
    return _body(layout, "channel groups", group.channels, heads=group.heads, scale_dtype=scale_dtype, table=True)


def _unsupported(layout: PlaneLayout, *, pre_rope: bool) -> str | None:
    if pre_rope:
        return "keys cached before RoPE, which no CPU kernel rotates"
    if layout.channels > MOST_CHANNELS:
        return f"head_dim {layout.channels}; CPU kernels serve up to {MOST_CHANNELS}"
    if layout.bits > MOST_BITS or len(layout.sets) > 2:
        return f"{layout.bits}-bit codes; CPU kernels unpack those of up to {MOST_BITS} bits in two plane sets"
    return None


def _body(layout: PlaneLayout, affine: Affine, group: int, **options: Any) -> Body:
    p = layout
    return Body(p.bits, p.sets[0], p.channels, p.chunks, p.width, p.slots, p.span, affine, group, **options)
