"""The protocol of readers, which turn the stored arrays of keys into scores, or of values into
weighted values, inside a kernel.

A reader is static. Keys and values are independent, so any two readers can be combined. A hook is
called once for each tile of tokens, reads the arrays in place and leaves nothing in memory.

                        scores of a tile                        weighted values of a tile
    grouped, channels   sum_g s_g (q_g . c_g) + z_g sum(q_g)    p . (c s + z), s and z of a token
                                                                and a group of channels
    grouped, tokens     q . (c s + z), s and z of a channel     p . (c s + z), s and z of a channel
    dense               q . k                                   p . v

Tiles are token-major, and the query heads of a KV head are the N columns of a tensor-core dot. N =
8 for up to 8 heads, which is half the work of the usual M = 16 rows, most of which would be
padding.

This module imports no Triton, so code that only needs the type of a reader does not import the
kernels.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.partial_attention import WEIGHT_EXPONENT, PartialAttention
from pallas_kernels.decode_attention.schedule import Pieces
from pallas_kernels.launch import Launch
from pallas_kernels.readers.turn import TurnTables
from pallas_kernels.tiles.halves import Half
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.tile import Tile

SlotRows = list[Float[Array, "rows GP"]]


class LoopStep(NamedTuple):
    """The most that a loop step of decode attention reads without spilling, counted from machine
    code (docs/kernels.md).

    Args:
        tile: tokens.
        stages: of Triton's pipeline.
        warps: of a program.
        crowded: the step fills the registers, so array operations, which need more of them than
            assembly, take half as many tokens.
    """

    tile: int
    stages: int = 3
    warps: int = 1
    crowded: bool = False


class Reader(abc.ABC):
    """Keys or values of one layer, as a kernel reads them.

    Arrays have leading axes [B, K], which a kernel fixes at the row and head that it reads. Either
    may be shorter if neighbours share an entry, down to 1 if all rows of the batch, or all heads,
    do.
    """

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Return the number of tokens that share a row of words.

        A tile's scores and weights are one array [tile / slots, GP] for each slot.
        """

    @property
    @abc.abstractmethod
    def chunks(self) -> tuple[int, int]:
        """Return (count, width) of the chunks that the H channels are cut into. Each chunk has one
        accumulator tile.
        """

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Return the bytes per token that a loop step holds in shared memory, not counting the few
        for tables and for groups of tokens.
        """

    @property
    @abc.abstractmethod
    def step(self) -> LoopStep:
        """Return the default step of decode attention."""

    @property
    def packed(self) -> bool:
        """Return True for packed words. Their rows come in whole spans, and dots take them from
        registers, not from memory.
        """
        return True

    @property
    def parts(self) -> int:
        """Return the number of steps in which the slots of a tile are read. Each reads the same
        number of neighbouring slots.
        """
        return 1

    @property
    def min_tile(self) -> int:
        """Return the fewest tokens that a tile may have."""
        return SPAN

    @property
    def longest_tile(self) -> int | None:
        """Return the most tokens that a tile may have, or None for any number."""
        return None

    @abc.abstractmethod
    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Reshape the stored arrays [B, K, ...] to the form that the kernel indexes, without a
        copy.
        """

    @property
    def turns(self) -> bool:
        """Return True for keys before RoPE. Their frequencies, the attention factor and, if there
        are several shards, the shard's number come after the other arrays.
        """
        return False

    @property
    def reads_shards(self) -> bool:
        """Return True if an array may hold the tokens of every n-th block of a body."""
        return True

    @property
    def reads_windows(self) -> bool:
        """Return True if a tile may have tokens before those that count."""
        return self.parts == 1 and not (self.adds_scores or self.adds_values)

    @property
    def off_triton(self) -> str | None:
        """Return, in one line, why Triton's kernels do not read this form, which Mosaic GPU's then
        read alone, or None if they do.
        """
        return None

    def placed(self, sink: int, block: int, shards: int) -> Reader:
        """Return the reader of keys that begin after `sink` tokens, in a body whose blocks are
        dealt out to `shards` shards.
        """
        return self

    @property
    def sums_codes(self) -> bool:
        """Return True if `weigh` accumulates intermediate sums that `values_of` turns into values.
        They have as many channels as `chunks`.
        """
        return False

    def values_of(
        self, part: PartialAttention, stored: Sequence[Array], first: int = 0
    ) -> PartialAttention:
        """Replace the sums of `weigh` by weighted values.

        Args:
            part: attention with these sums.
            stored: the stored arrays of all KV heads.
            first: the first KV head of the part.
        """
        return part

    @property
    def adds_scores(self) -> bool:
        """Return True if `more_scores` returns anything."""
        return False

    @property
    def adds_values(self) -> bool:
        """Return True if `more_values` returns anything. The kernel then keeps all scores."""
        return False

    def more_values(
        self,
        scores: Float[Array, "B k R S"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        first: int = 0,
    ) -> list[Pieces]:
        """Return additional values of the first limits[b] tokens, weighted by 2^score, as parts
        whose l is 0.

        Args:
            scores: the scores of all tokens.
            stored: the stored arrays of all KV heads.
            limits: the number of tokens of each row.
            launch: how a kernel is launched.
            first: the KV head of the first scores.
        """
        return []

    def more_scores(
        self,
        q: Float[Array, "B k Q H"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        group: int,
        turned: TurnTables | None = None,
        first: int = 0,
    ) -> Float[Array, "B k G S"] | None:
        """Return the scores to be added to q . k of the first limits[b] tokens, not scaled, or None
        if there are none.

        Args:
            q: queries, padded to Q heads per KV head.
            stored: the stored arrays of all KV heads.
            limits: the number of tokens of each row.
            launch: how a kernel is launched.
            group: G, the number of real query heads per KV head, which come first.
            turned: the rotation of keys that are stored before RoPE.
            first: the KV head of the first queries.
        """
        return None

    @abc.abstractmethod
    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        """Return the arrays that `scores` needs of the queries, computed once outside the kernel. q
        is fp32 and not scaled.
        """

    def opened(self, query: Sequence[Any]) -> Sequence[Any]:
        """Return the query argument of `scores` from the refs of the arrays of `query`. A kernel
        calls this once, before its loop.
        """
        return query

    def opened_arrays(self, refs: Sequence[Any], asm: bool) -> Sequence[Any]:
        """Return the arrays argument of `scores`, `weigh` and `rows` from the refs of `arrays`. A
        kernel calls this once, before its loop.
        """
        return refs

    @property
    def weight_exponent(self) -> int:
        """Return the power of two of the largest weight that `weigh` takes."""
        return WEIGHT_EXPONENT

    @abc.abstractmethod
    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> SlotRows:
        """Return log2(e) / sqrt(H) * q . k of a tile, fp32. The result for tokens that do not count
        is ignored.
        """

    @abc.abstractmethod
    def weigh(
        self,
        weights: SlotRows,
        refs: Sequence[Any],
        tile: Tile,
        sums: list[Float[Array, "W GP"]],
        asm: bool,
    ) -> list[Array]:
        """Add the weighted values of a tile to `sums`, one for each chunk of channels. Weights of
        tokens that do not count are 0.
        """

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        """Return a function that reads rows of a tile in fp16, for keys that are rotated: (slot,
        chunk) -> the slot's tokens, the chunk's channels.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give single rows")
