"""The two matrices of an eigenbasis as a model carries them: entries of 16 bits, and a unit for
each channel of the basis.

    unit = max |a| / 32767,   code = round(a / unit),   a^ = code * unit

An entry errs by at most 1.6e-5 of the largest of its channel.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kvq_jax.types.array_types import ArraySpec, Axis, Tree

MAX_CODE = 32767
CHANNELS = {"analysis": -1, "synthesis": -2}  # the axis of the basis's channels


def specs(heads: int, channels: int) -> dict[str, ArraySpec]:
    """Describe the arrays of both matrices, for K heads of H channels."""
    rows = Axis("kv_heads", heads), Axis("channels", channels)
    return {
        name + end: spec
        for name in CHANNELS
        for end, spec in (
            ("", ArraySpec((*rows, Axis("none", channels)), "int16")),
            ("_unit", ArraySpec(rows, "float32")),
        )
    }


def stored(matrices: Tree) -> dict[str, Shaped[Array, "..."]]:
    """Return the arrays of both matrices, given as [K, H, H] fp32 by their names."""
    arrays = {}
    for name, axis in CHANNELS.items():
        unit = jnp.max(jnp.abs(matrices[name]), axis=-3 - axis, keepdims=True) / MAX_CODE
        codes = jnp.round(matrices[name] / jnp.where(unit > 0, unit, 1))
        arrays |= {name: codes.astype(jnp.int16), f"{name}_unit": jnp.squeeze(unit, -3 - axis)}
    return arrays


def analysis(params: Tree) -> Float[Array, "K H H"]:
    """Return the matrix that makes channels of rows, fp32."""
    return params["analysis"].astype(jnp.float32) * params["analysis_unit"][:, None, :]


def synthesis(params: Tree, channels: int | None = None) -> Float[Array, "K channels H"]:
    """Return the matrix that makes rows of the first channels (default: of all), fp32."""
    codes, unit = params["synthesis"][:, :channels], params["synthesis_unit"][:, :channels]
    return codes.astype(jnp.float32) * unit[:, :, None]
