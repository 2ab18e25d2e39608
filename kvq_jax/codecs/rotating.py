"""Rows that are rotated before they are quantized, so that a few large channels do not make the
steps of all others coarse.

    body = quantize(R k)        q . k = (R q) . (R k)        sum_t p_t v_t = R^T sum_t p_t (R v_t)

R is one orthogonal matrix for all heads (arrays/rotations.py). Attention turns the query, once for
a step, and the weighted sum, once for a chunk of the body or for a kernel's whole sum; nothing is
stored for it and no cached row is turned back. Keys that are cached before RoPE are the exception:
a rotation of all channels does not commute with RoPE, so each is turned back before it is rotated
to its position. Windows hold rows as they are. Source: Ashkboos et al., QuaRot, section 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvq_jax.arrays.rotations import rotation, turn, turn_back
from kvq_jax.codecs.base import Codec, KernelJob
from kvq_jax.codecs.kernel_readers import Reader
from kvq_jax.codecs.native_bodies import Body
from kvq_jax.codecs.wrapping import Wrapping
from kvq_jax.types.array_types import CachedRows, LayerInputs, Tree
from kvq_jax.types.rope import Rope

OPTION = "rotate=true"
LARGEST_ENTRY = (
    2.0**20
)  # what is larger saturates before it is rotated: one entry is a part of every channel
BEFORE_ROPE = f"{OPTION} with keys cached before RoPE, which no kernel turns back"


@dataclasses.dataclass(frozen=True)
class Rotating(Wrapping):
    """The codec `inner`, applied to rotated rows of H channels. Its prompt statistics and its
    calibration are those of rotated rows."""

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, *, prefill: bool) -> Tree:
        return self.inner.quantize(params, stats, _turned(rows), prefill=prefill)

    def dequantize(self, params: Tree, stats: Tree, body: Tree) -> CachedRows:
        return turn_back(self.inner.dequantize(params, stats, body))

    def calibrate(
        self, rows: Float[np.ndarray, "tokens K H"], gradients: Float[np.ndarray, "tokens K H"]
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        matrix = rotation(rows.shape[-1]).T
        return self.inner.calibrate(rows @ matrix, gradients @ matrix)

    def calibration_key(self) -> str:
        key = self.inner.calibration_key()
        return f"{key},{OPTION}" if key else key

    def prompt_statistics(self, params: Tree, inputs: LayerInputs) -> Tree:
        names = "q_pre", "q_rot", "k_pre", "k_rot", "v"
        given = {name: array for name in names if (array := getattr(inputs, name)) is not None}
        return self.inner.prompt_statistics(
            params, dataclasses.replace(inputs, **{name: _turned(a) for name, a in given.items()})
        )

    def query(self, params: Tree, stats: Tree, q: Float[Array, "B K R H"]) -> Tree:
        return self.inner.query(params, stats, turn(q)) if self.stores_vectors else q

    def scores(
        self,
        params: Tree,
        stats: Tree,
        query: Tree,
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R C"]:
        if self.stores_vectors:
            return self.inner.scores(params, stats, query, body, positions, rope)
        return Codec.scores(self, params, stats, query, body, positions, rope)

    def weighted(
        self,
        params: Tree,
        stats: Tree,
        weights: Float[Array, "B K R C"],
        body: Tree,
        positions: Int[Array, "#B C"],
        rope: Rope | None,
    ) -> Float[Array, "B K R H"]:
        return turn_back(self.inner.weighted(params, stats, weights, body, positions, rope))

    def kernel_reader(self) -> Reader | str:
        return self.inner.kernel_reader() if self.stores_vectors else BEFORE_ROPE

    def native_body(self) -> Body | str:
        return self.inner.native_body() if self.stores_vectors else BEFORE_ROPE

    @property
    def sums_vectors(self) -> bool:
        return False

    def kernel_sum(self, weighted: Float[Array, "B K R H"]) -> Float[Array, "B K R H"]:
        return turn_back(self.inner.kernel_sum(weighted))

    def kernel_job(self, stats: Tree, *, prefill: bool) -> KernelJob | None:
        """Return None: no kernel rotates the rows that it quantizes."""
        return None

    def describe(self) -> dict[str, Any]:
        return self.inner.describe() | {"rotate": True}


def rotated(codec: Codec) -> Codec:
    """Return the codec for rotated rows; one that keeps rows in full precision, as it is."""
    return codec if codec.exact else Rotating(codec)


def _turned(rows: Float[Array, "B heads T H"]) -> Float[Array, "B heads T H"]:
    """Return R x, fp32, of the finite part of rows: NaN counts as 0, infinities as the largest
    entry."""
    finite = jnp.where(jnp.isnan(rows), 0, rows).astype(jnp.float32)
    return turn(jnp.clip(finite, -LARGEST_ENTRY, LARGEST_ENTRY))
