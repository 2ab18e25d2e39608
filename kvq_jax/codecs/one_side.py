"""What codecs of keys alone, or of values alone, have in common: which rows they cache, and how
those become keys and values."""

from __future__ import annotations

from jaxtyping import Array, Int

from kvq_jax.codecs.base import Codec, Side, rotate_keys, side_rows
from kvq_jax.types.array_types import CachedRows, LayerInputs, RowsBKTH, Tree
from kvq_jax.types.rope import Rope


class OneSideCodec(Codec):
    """side: whose rows are cached. pre_rope: True where keys are cached before RoPE, and rotated
    when they are read. Both are fields of the codecs that derive from this."""

    side: Side
    pre_rope: bool

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, self.side, self.pre_rope)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        return rotate_keys(rows, positions, rope) if self.pre_rope else rows

    @property
    def stores_vectors(self) -> bool:
        return not self.pre_rope

    @property
    def only_rotates(self) -> bool:
        return self.pre_rope

    @property
    def before_rope(self) -> bool:
        return self.pre_rope
