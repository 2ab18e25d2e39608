"""Groups of neighbouring channels of one token: inside a head, or whole heads side by side.

A group of g channels of the layer's KV width (heads side by side) lies inside one head if g <= H.
If g is larger, it spans `heads` whole heads. Its statistics (a scale, a zero point) are stored as
[B, K / heads, H / channels, S].
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kvq_jax.types.array_types import Axis


@dataclasses.dataclass(frozen=True)
class ChannelGroup:
    """heads x channels neighbouring entries of one token. channels == H whenever heads > 1."""

    heads: int
    channels: int

    AXES = (2, 5)  # the axes of one group in the result of `cut`

    def cut(self, rows: Array) -> Array:
        """Split heads and channels into groups.

        [B, K, T, H] -> [B, K / heads, heads, T, H / channels, channels].
        """
        b, k, t, h = rows.shape
        return rows.reshape(b, k // self.heads, self.heads, t, h // self.channels, self.channels)

    def stored(self, statistic: Array) -> Array:
        """Lay out a statistic that was reduced over AXES (kept with size 1) as it is stored.

        Returns [B, K / heads, H / channels, T].
        """
        return jnp.swapaxes(jnp.squeeze(statistic, self.AXES), 2, 3)

    def repeated(self, statistic: Shaped[Array, "B groups rest S"]) -> Shaped[Array, "B K S H"]:
        """Repeat a stored statistic to one entry for each element."""
        per_channel = jnp.repeat(jnp.swapaxes(statistic, 2, 3), self.channels, axis=3)
        return jnp.repeat(per_channel, self.heads, axis=1) if self.heads > 1 else per_channel

    def spread(self, statistic: Float[Array, "B groups rest S"]) -> Float[Array, "B K S H"]:
        """Repeat a stored statistic, in fp32, to one entry for each element."""
        return self.repeated(statistic.astype(jnp.float32))

    def axes(self, batch: int, heads: int, tokens: int, head_dim: int) -> tuple[Axis, ...]:
        """Return the axes of a stored statistic. Fewer heads than a group spans count as one
        group."""
        across = Axis("kv_heads", max(heads, self.heads), per=self.heads)
        return (
            Axis("batch", batch),
            across,
            Axis("channels", head_dim, per=self.channels),
            Axis("tokens", tokens),
        )


def channel_group(requested: int, heads: int, head_dim: int) -> ChannelGroup:
    """Return the group of `requested` channels of a KV width of heads * head_dim.

    Args:
        requested: channels in a group. 0 requests the whole width.
        heads: K.
        head_dim: H.

    Raises ValueError, listing the possible sizes, if the groups would not be equal parts of heads
    or whole heads.
    """
    size = requested or heads * head_dim
    if head_dim % size == 0:
        return ChannelGroup(1, size)
    if size % head_dim == 0 and heads % (size // head_dim) == 0:
        return ChannelGroup(size // head_dim, head_dim)
    inside = divisors(head_dim)
    across = tuple(n * head_dim for n in divisors(heads)[1:])
    raise ValueError(
        f"group_size={requested} does not divide a KV width of {heads} heads of {head_dim}; sizes:"
        f" {', '.join(map(str, inside + across))}"
    )


def divisors(size: int, up_to: int | None = None) -> tuple[int, ...]:
    """Return the divisors of `size`, in rising order, none of them above `up_to`."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return tuple(d for d in sorted({*small, *(size // d for d in small)}) if d <= (up_to or size))
