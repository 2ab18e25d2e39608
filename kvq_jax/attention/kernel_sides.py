"""What the kernels need to know of a codec's stored arrays, as `pallas_kernels.sides` describes them; or why they cannot read them."""

from __future__ import annotations

from typing import Protocol

from kvq_jax.quantized import GroupFormat
from pallas_kernels.planes import SUPPORTED_BITS, Planes
from pallas_kernels.sides import Dense, Grouped, Side
from pallas_kernels.tile import SPAN

HEAD_DIMS = (64, 128, 256)
TOKEN_GROUPS = (32, 64, 128)  # powers of two, as all that a kernel holds, from a span to the longest step


class StoredGroups(Protocol):
    """What is looked at of a `GroupCodec`."""

    @property
    def format(self) -> GroupFormat: ...
    @property
    def pre_rope(self) -> bool: ...


def grouped(codec: StoredGroups) -> Side | str:
    """The side of uniformly quantized groups, or one line that says why there is none."""
    format, layout = codec.format, codec.format.layout
    if codec.pre_rope:
        return "keys cached before RoPE are rotated when they are read, which the kernels do not do"
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
    planes = Planes(layout.bits, layout.channels, layout.chunks, layout.plane, layout.slots)
    return Grouped(planes, format.axis, format.group_size, None if format.stores_zero else format.centre, format.scale_dtype)


def dense(channels: int, dtype: str) -> Side | str:
    """The side of exact rows, or one line that says why there is none."""
    if dtype not in ("bfloat16", "float16"):
        return f"exact rows in {dtype}; kernels read bfloat16 and float16"
    return head_dim_unsupported(channels) or Dense(channels, dtype)


def head_dim_unsupported(channels: int) -> str | None:
    return None if channels in HEAD_DIMS else f"head_dim {channels}; kernels serve {', '.join(map(str, HEAD_DIMS))}"
