"""The protocol of readers: what turns the stored arrays of keys, or of values, into scores or into
weighted values inside a kernel.

A reader is static. Keys and values are independent: any reader serves for either. A hook is called
once for each tile of tokens, reads the arrays where they lie and leaves nothing in memory.

                        scores of a tile                                  weighted values of a tile
    grouped, channels   sum_g s_g (q_g . c_g) + z_g sum(q_g)              p . (c s + z), s and z of a token and a group of channels
    grouped, tokens     q . (c s + z), s and z of a channel               p . (c s + z), s and z of a channel
    dense               q . k                                             p . v

Token-major tiles meet the query heads of a KV head as the N columns of a tensor-core dot, N = 8 for
up to 8 heads: half the work of the usual M = 16 rows, most of which would be padding.

This module imports no Triton, so that code that only asks for a reader's type does not import the
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
from pallas_kernels.readers.turn import Turn
from pallas_kernels.tiles.halves import Half
from pallas_kernels.tiles.layout import SPAN
from pallas_kernels.tiles.tile import Tile

Rows = list[Float[Array, "rows GP"]]


class Step(NamedTuple):
    """The most that a loop step of decode attention reads without spilling, counted from machine
    code (docs/kernels.md).

    tile: tokens. stages: of Triton's pipeline. warps: of a program. crowded: the registers are full
    of what a step computes, so array operations, which hold more at a time than assembly, take half
    as many tokens.
    """

    tile: int
    stages: int = 3
    warps: int = 1
    crowded: bool = False


class Reader(abc.ABC):
    """Keys or values of one layer, as a kernel reads them.

    Arrays have leading axes [B, K], which a kernel fixes at the row and head that it reads; either
    may be shorter where neighbours share an entry: 1 where all rows of the batch, or all heads, do.
    """

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Return the number of tokens that share a row of words.

        A tile's scores and weights come as one array [tile / slots, GP] for each slot."""

    @property
    @abc.abstractmethod
    def chunks(self) -> tuple[int, int]:
        """Return (count, width) of the chunks that the H channels are cut into, one tile of an
        accumulator for each."""

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Return the bytes of a token that a loop step holds in shared memory, without the few of
        tables and of groups of tokens."""

    @property
    @abc.abstractmethod
    def step(self) -> Step:
        """Return the usual step of decode attention."""

    @property
    def packed(self) -> bool:
        """Return True for packed words: their rows come in whole spans, and dots take them from
        registers, not where they lie."""
        return True

    @property
    def parts(self) -> int:
        """Return the number of steps in which the slots of a tile are read, as many neighbouring
        ones in each."""
        return 1

    @property
    def least_tile(self) -> int:
        """Return the fewest tokens that a tile may have."""
        return SPAN

    @property
    def longest_tile(self) -> int | None:
        """Return the most tokens that a tile may have; None for any number."""
        return None

    @property
    def scores_tile(self) -> int:
        """Return the tokens of a step where scores are stored (matvec.py)."""
        return 64

    @abc.abstractmethod
    def arrays(self, stored: Sequence[Array]) -> tuple[Array, ...]:
        """Reshape the stored arrays [B, K, ...] as the kernel indexes them. No copy."""

    @property
    def turns(self) -> bool:
        """Return True for keys before RoPE: the frequencies, the attention factor and, of several
        shards, the number of this one come after the other arrays."""
        return False

    @property
    def reads_shards(self) -> bool:
        """Return True if the tokens of an array may be every so many blocks of a body."""
        return True

    def placed(self, sink: int, block: int, shards: int) -> Reader:
        """Return the reader of keys that begin after so many tokens, of a body whose blocks are
        dealt out to so many shards."""
        return self

    @property
    def sums_codes(self) -> bool:
        """Return True if `weigh` does not sum values, but what `values_of` makes them from, in as
        many channels as `chunks` are."""
        return False

    def values_of(
        self, part: PartialAttention, stored: Sequence[Array], first: int = 0
    ) -> PartialAttention:
        """Return the attention with weighted values in place of what `weigh` has summed. first: the
        KV head that the part begins with; of `stored` come all."""
        return part

    @property
    def adds_scores(self) -> bool:
        """Return True if `more_scores` gives anything."""
        return False

    @property
    def adds_values(self) -> bool:
        """Return True if `more_values` gives anything: the kernel then keeps all scores."""
        return False

    def more_values(
        self,
        scores: Float[Array, "B k R S"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        first: int = 0,
    ) -> list[Pieces]:
        """Return what is to be added to the values of the first limits[b] tokens, weighted by
        2^score, as parts whose l is 0.

        first: the KV head that the scores begin with; of `stored` come all.
        """
        return []

    def more_scores(
        self,
        q: Float[Array, "B k Q H"],
        stored: Sequence[Array],
        limits: Int[Array, " B"],
        launch: Launch,
        group: int,
        turned: Turn | None = None,
        first: int = 0,
    ) -> Float[Array, "B k G S"] | None:
        """Return what is to be added to q . k of the first limits[b] tokens, not scaled; None for
        nothing.

        group: G, the first query heads of each KV head; the rest of Q are padding. turned: the
        rotation of keys that are stored before RoPE. first: the KV head that q begins with; of
        `stored` come all.
        """
        return None

    @abc.abstractmethod
    def query(self, q: Float[Array, "B K GP H"], stored: Sequence[Array]) -> tuple[Array, ...]:
        """Return what `scores` needs of the queries, made once outside the kernel. q is fp32 and
        not scaled."""

    def opened(self, query: Sequence[Any]) -> Sequence[Any]:
        """Return what `scores` takes as its query, from the refs of these arrays. A kernel calls it
        once, before its loop."""
        return query

    def opened_arrays(self, refs: Sequence[Any], asm: bool) -> Sequence[Any]:
        """Return what `scores`, `weigh` and `rows` take as their arrays, from the refs of `arrays`.
        A kernel calls it once, before its loop."""
        return refs

    @property
    def weight_exponent(self) -> int:
        """Return the power of two of the largest weight that `weigh` takes."""
        return WEIGHT_EXPONENT

    @abc.abstractmethod
    def scores(self, query: Sequence[Any], refs: Sequence[Any], tile: Tile, asm: bool) -> Rows:
        """Return log2(e) / sqrt(H) * q . k of a tile, fp32. What it gives for tokens that do not
        count is not used."""

    @abc.abstractmethod
    def weigh(
        self,
        weights: Rows,
        refs: Sequence[Any],
        tile: Tile,
        sums: list[Float[Array, "W GP"]],
        asm: bool,
    ) -> list[Array]:
        """Add the weighted values of a tile to `sums`, one for each chunk of channels. Weights of
        tokens that do not count are 0."""

    def rows(self, refs: Sequence[Any], tile: Tile, asm: bool) -> Callable[[int, int], Half]:
        """Return a function that reads rows of a tile in fp16, for keys that are rotated: (slot,
        chunk) -> the slot's tokens, the chunk's channels."""
        raise NotImplementedError(f"{type(self).__name__} does not give single rows")
