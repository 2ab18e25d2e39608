"""The uniformly quantized array with a second scale across its groups.

    x[b, k, t, h]  ~  (code * step + zero) * scale

Groups over the tokens of one channel have a second scale for each token, of one head or several.
Groups over the channels of one token have one for each channel of some neighbouring tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvq_jax.arrays import grouped_array, uniform
from kvq_jax.arrays.grouped_array import GroupedArray, GroupFormat
from kvq_jax.arrays.stored import BodySpec
from kvq_jax.types.array_types import Axis
from kvq_jax.types.pytree import describe, pytree

Rows = Float[Array, "B K T H"]


@pytree
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """x ~ groups * scale.

    groups: the quantized quotients.
    scale: [B, K / heads, S / tokens, width], width 1 beside groups over tokens and H beside groups
        over channels.
    """

    groups: GroupedArray
    scale: Float[Array, "B scales S width"]

    def out_of_range(self) -> uniform.OutOfRange:
        """Return which runs of tokens meet an end of the range of rows."""
        format = self.groups.format
        grouped, axis = grouped_array.split(jnp.abs(dequantize(self)), format)
        return uniform.out_of_range(
            grouped_array.stored(jnp.max(grouped, axis, keepdims=True), format),
            self.groups.scale,
            uniform.saturation_limit(format.scale_dtype),
            format.scale_token_axis,
        )


def specs(
    format: GroupFormat, batch: int, heads: int, tokens: int, share: tuple[int, int]
) -> ScaledArray:
    """Describe the arrays of a body of `tokens` tokens.

    share: the heads and the tokens that share a second scale.
    """
    axes = (
        Axis("batch", batch),
        Axis("kv_heads", max(heads, share[0]), per=share[0]),
        Axis("tokens", tokens, per=share[1]),
        Axis("none", 1) if format.axis == "tokens" else Axis("channels", format.channels),
    )
    return describe(
        ScaledArray,
        groups=grouped_array.specs(format, batch, heads, tokens),
        scale=BodySpec(axes, format.scale_dtype),
    )


def quantize(
    rows: Rows, scale: Float[Array, "B scales S width"], format: GroupFormat
) -> ScaledArray:
    """Quantize rows divided by their second scale as stored. It is positive in the stored dtype,
    and raised if the quotients would saturate. Rows lie within `uniform.saturation_limit`."""
    limit = uniform.NEAR * uniform.saturation_limit(format.scale_dtype)
    scale = jnp.maximum(scale, _largest(rows, scale) / limit)
    scale = uniform.as_stored(scale, format.scale_dtype)
    return ScaledArray(grouped_array.quantize(rows / _spread(scale, rows), format), scale)


def dequantize(body: ScaledArray) -> Rows:
    """Return (code * step + zero) * scale, fp32 [B, K, T, H]."""
    rows = grouped_array.dequantize(body.groups)
    return rows * _spread(body.scale, rows)


def _largest(
    rows: Rows, scale: Float[Array, "B scales S width"]
) -> Float[Array, "B scales S width"]:
    """Return the largest magnitude among the entries that share each second scale."""
    batch, heads, tokens, channels = rows.shape
    _, scales, runs, width = scale.shape
    shape = batch, scales, heads // scales, runs, tokens // runs, width, channels // width
    return jnp.max(jnp.abs(rows).reshape(shape), axis=(2, 4, 6))


def _spread(scale: Float[Array, "B scales S width"], rows: Rows) -> Float[Array, "B K T width"]:
    for axis in (1, 2):
        scale = jnp.repeat(scale, rows.shape[axis] // scale.shape[axis], axis)
    return scale.astype(jnp.float32)
