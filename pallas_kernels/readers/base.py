"""Hooks of the decode-attention skeleton: what turns the stored arrays of one side of a cache into scores, or into weighted values.

A side is static. Keys and values are independent: any side serves as either. A hook is called once for each tile of tokens, reads the
arrays where they lie and leaves nothing in memory.

                        scores of a tile                                  weighted values of a tile
    grouped, channels   sum_g s_g (q_g . c_g) + z_g sum(q_g)              p . (c s + z), s and z of a token and a group of channels
    grouped, tokens     q . (c s + z), s and z of a channel               p . (c s + z), s and z of a channel
    dense               q . k                                             p . v

Token-major tiles meet the query heads of a KV head as the N columns of a tensor-core dot, N = 8 for up to 8 heads: half the work of the
usual M = 16 rows, most of which would be padding.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.launch import Launch
from pallas_kernels.tiles.arithmetic import Half
from pallas_kernels.tiles.tile import Tile

Rows = list[Float[Array, "rows GP"]]


class Side(abc.ABC):
    """Keys or values of one layer, as a kernel reads them. Arrays have leading axes [B, K], which a kernel's block fixes; either may be
    shorter where neighbours share an entry: 1 where all rows of the batch, or all heads, do."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Tokens that share a row of words; a tile's scores and weights come as one array [tile / slots, GP] for each slot."""

    @property
    @abc.abstractmethod
    def chunks(self) -> tuple[int, int]:
        """(count, width): how the H channels are cut into the tiles of an accumulator."""

    @abc.abstractmethod
    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """The stored arrays [B, K, ...], reshaped as the kernel indexes them. No copy."""

    @property
    def adds_values(self) -> bool:
        """Whether `more_values` gives anything: the kernel then keeps all scores."""
        return False

    def more_values(
        self, weights: Float[Array, "B K G S"], stored: Sequence[Array], limits: Int[Array, " B"]
    ) -> Float[Array, "B K G H"] | None:
        """What is to be added to the weighted values of the first limits[b] tokens; None for nothing."""
        return None

    def more_scores(
        self, q: Float[Array, "B K G H"], stored: Sequence[Array], limits: Int[Array, " B"], how: Launch
    ) -> Float[Array, "B K G S"] | None:
        """What is to be added to q . k of the first limits[b] tokens, not scaled; None for nothing."""
        return None

    @abc.abstractmethod
    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        """What `scores` needs of the queries, made once outside the kernel. q is fp32 and not scaled."""

    @abc.abstractmethod
    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        """log2(e) / sqrt(H) * q . k of a tile, fp32. What it gives for tokens that do not count is not used."""

    @abc.abstractmethod
    def weigh(self, weights: Rows, refs: Sequence[Any], tile: Tile, sums: list[Float[Array, "W GP"]], asm: bool) -> list[Array]:
        """`sums`, one for each chunk of channels, plus the weighted values of a tile. Weights of tokens that do not count are 0."""

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        """What reads the rows of a tile in fp16: (slot, chunk) -> the slot's tokens, the chunk's channels. For keys that are rotated."""
        raise NotImplementedError(f"{type(self).__name__} does not give single rows")
