"""TurboQuant's codec of rows that were rotated already (codecs/rotating.py): a norm for each
vector, and a code for each coordinate."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvq_jax.arrays import codebook_array
from kvq_jax.arrays.codebook_array import CodebookArray
from kvq_jax.arrays.uniform import as_stored
from kvq_jax.codecs.codebook import CodebookCodec
from kvq_jax.codecs.codec import TokensAt
from kvq_jax.codecs.facts import Facts, PaperCount
from kvq_jax.codecs.kernels import table_of
from kvq_jax.types.array_types import CachedRows, Tree


@dataclasses.dataclass(frozen=True)
class SphereCodec(CodebookCodec):
    """x^ = levels[code] * |x| for each token and head. `format.group` is the head, and the format
    stores no zero points."""

    def quantize(self, params: Tree, stats: Tree, rows: CachedRows, at: TokensAt) -> CodebookArray:
        """Quantize rows against their norms as stored. Entries that are not finite count as 0, and
        norms saturate in the stored dtype."""
        group, dtype = self.format.group, self.format.scale_dtype
        assert group is not None, "a norm belongs to a head of a token"
        x = jnp.where(jnp.isfinite(rows), rows, 0).astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(group.cut(x) ** 2, group.AXES, keepdims=True))
        scale = as_stored(group.stored(jnp.minimum(norm, float(jnp.finfo(dtype).max))), dtype)
        levels = table_of(self.levels)
        return codebook_array.quantize(x, self.format, levels, levels, scale, None)

    @property
    def facts(self) -> Facts:
        counted = self.format.bits + 16 / self.format.channels  # a 16-bit norm
        paper = PaperCount(bits=lambda *_: counted)
        return dataclasses.replace(super().facts, requantizes="drifts", paper=paper)

    def _kernel_arrays(self, params: Tree, body: CodebookArray) -> list[Any]:
        """Return the arrays of a codebook: kernels add a zero point, which is 0."""
        assert body.scale is not None, "norms are stored"
        return [*body.words, table_of(self.levels), body.scale, jnp.zeros_like(body.scale)]
