"""The part that codecs of keys alone, or of values alone, share: caching their rows, and turning
these into keys and values."""

from __future__ import annotations

from jaxtyping import Array, Int

from kvq_jax.codecs.codec import Codec, Side, rotate_keys, side_rows
from kvq_jax.codecs.facts import Facts
from kvq_jax.types.array_types import CachedRows, LayerInputs, RowsBKTH, Tree
from kvq_jax.types.rope import Rope


class OneSideCodec(Codec):
    """A codec of one side's rows.

    Both attributes are fields of the codecs that derive from this.

    side: the side whose rows are cached.
    pre_rope: True if keys are cached before RoPE and rotated when they are read.
    """

    side: Side
    pre_rope: bool

    def rows(self, params: Tree, inputs: LayerInputs) -> CachedRows:
        return side_rows(inputs, self.side, self.pre_rope)

    def vectors(
        self, params: Tree, rows: CachedRows, positions: Int[Array, "#B T"], rope: Rope | None
    ) -> RowsBKTH:
        return rotate_keys(rows, positions, rope) if self.pre_rope else rows

    @property
    def facts(self) -> Facts:
        return Facts(form="before_rope" if self.pre_rope else "vectors")
