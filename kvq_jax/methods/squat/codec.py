"""SQuat's key codec: KIVI's groups, but channels are quantized block after block, and the rest is
corrected in between (subspace.py)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvq_jax.arrays import uniform
from kvq_jax.arrays.grouped_array import GroupedArray
from kvq_jax.arrays.packing import pack
from kvq_jax.codecs.codec import MissingInputError, TokensAt
from kvq_jax.codecs.facts import Facts
from kvq_jax.codecs.grouped import GroupedCodec
from kvq_jax.codecs.kernels import Kernels, by_xla
from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.methods.squat import subspace
from kvq_jax.types.array_types import ArraySpec, Axis, CachedRows, LayerInputs, Tree


@dataclasses.dataclass(frozen=True)
class SquatCodec(GroupedCodec):
    """Keys per channel over groups of tokens, stored and read as KIVI's.

    The prompt statistics of a batch row are the matrices that correct its keys, [B, K, H - block,
    H - last block] fp32, zeros for a row without a prompt.

    query_rope: the subspace is spanned by queries after RoPE.
    ahead: if not 0, it is spanned by queries before RoPE, rotated to each of the `ahead` positions
        after the prompt.
    normalize: S^2 is divided by the prompt's length.
    shared: all rows of a batch take the matrices of the first one that has a prompt.
    """

    rank: int = 5
    lam: float = 1e-3
    block_channels: int = 64
    query_rope: bool = True
    ahead: int = 0
    normalize: bool = False
    shared: bool = False

    def quantize(self, params: Tree, stats: Array, rows: CachedRows, at: TokensAt) -> GroupedArray:
        """Quantize blocks of channels in turn. The ranges of each are taken after the corrections
        for the blocks before it.

        An entry that is not finite, or saturates, corrects nothing.
        """
        format, width = self.format, self.block_channels
        limit = uniform.saturation_limit(format.scale_dtype)
        batch, heads, tokens, channels = rows.shape
        grouped = rows.astype(jnp.float32).reshape(batch, heads, -1, format.group_size, channels)
        blocks = []
        for start in range(0, channels, width):
            now, grouped = grouped[..., :width], grouped[..., width:]
            group = uniform.asymmetric(now, format.bits, 3, jnp.dtype(format.scale_dtype))
            blocks.append(group)
            if start + width < channels:
                error = jnp.where(jnp.abs(now) <= limit, uniform.dequantize(group) - now, 0)
                matrix = stats[:, :, start:, start : start + width]
                grouped = grouped + jnp.einsum(
                    "bkntc,bkrc->bkntr", error, matrix, precision=lax.Precision.HIGHEST
                )
        codes, scale, zero = (
            jnp.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True)
        )
        return GroupedArray(
            pack(codes.reshape(rows.shape), format.layout),
            jnp.squeeze(scale, 3),
            jnp.squeeze(zero, 3),
            format,
        )

    @property
    def statistics(self) -> Statistics:
        return Statistics(self._corrections_spec, self._corrections, unprompted=0.0)

    @property
    def facts(self) -> Facts:
        couples = frozenset(["rows"] if self.shared else [])
        return dataclasses.replace(super().facts, couples=couples)

    @property
    def kernels(self) -> Kernels:
        """The kernels of KIVI's keys, which read these too. None corrects what it quantizes."""
        return dataclasses.replace(super().kernels, writer=by_xla)

    def _corrections(self, params: Tree, inputs: LayerInputs) -> Float[Array, "B K _ _"]:
        """Return the matrices B_t H_t of the queries of all valid tokens."""
        queries = inputs.q_rot if self.query_rope and not self.ahead else inputs.q_pre
        if queries is None or (self.ahead and inputs.rope is None):
            option = (
                f"ahead={self.ahead} needs q_pre and the model's rope"
                if self.ahead
                else "queries=before_rope needs q_pre"
            )
            raise MissingInputError(f"{option}, not None")
        counted = inputs.valid
        if self.shared:
            row = jnp.argmax(counted[:, 0] & (inputs.positions[:, 0] == 0))
            queries, counted = (lax.dynamic_slice_in_dim(a, row, 1, 0) for a in (queries, counted))
        matrix = subspace.gram(queries, counted, inputs.k_rot.shape[1])
        length = jnp.sum(counted, axis=1, dtype=jnp.int32)
        if self.ahead and inputs.rope is not None:
            matrix = subspace.turned(matrix, length, self.ahead, inputs.rope)
        if self.normalize:
            matrix = matrix / jnp.maximum(length, 1).astype(jnp.float32)[:, None, None, None]
        matrices = subspace.corrections(matrix, self.rank, self.lam, self.block_channels)
        return jnp.broadcast_to(matrices, (inputs.valid.shape[0], *matrices.shape[1:]))

    def _corrections_spec(self, batch: int, heads: int) -> ArraySpec:
        channels, block = self.format.channels, self.block_channels
        blocks = -(-channels // block)
        matrix = Axis("none", channels - block), Axis("none", (blocks - 1) * block)
        return ArraySpec((Axis("batch", batch), Axis("kv_heads", heads), *matrix), "float32")
