"""The interface between block writers and the kernel that appends a token (append.py), and the
writers of uniform groups and of full-precision rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.quantize.group_kernels import channel_kernel, token_kernel
from pallas_kernels.quantize.kernel import QUANTIZE_TUNING, check_format
from pallas_kernels.quantize.rounding import Job
from pallas_kernels.quantize.writer import BlockWriter
from pallas_kernels.tiles.layout import SPAN


class RefView:
    """A ref that is indexed as if it were a part of it."""

    def __init__(self, ref: Any, place: Callable[..., tuple[Any, ...]]):
        self._ref, self._place, self.dtype = ref, place, ref.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        return self._ref[self._place(*index)]

    def __setitem__(self, index: tuple[Any, ...], value: Array) -> None:
        self._ref[self._place(*index)] = value


class Source:
    """Rows of a window [K, R, H], such as the rows of a unit. Token t lies in slot (slot + t) mod
    R.

    Args:
        window: ref of the window.
        slot: the slot of token 0.
        new: if the rows may include the new token, its slot (or -1) and its row, [1, columns] of
            each head. Another program writes that row into the window at the same time, so it is
            read from its source.
    """

    def __init__(
        self, window: Any, slot: Int[Array, ""] | int, new: tuple[Int[Array, ""], RefView] | None
    ):
        self._window, self._slot, self._new = window, slot, new
        self.heads, self.slots, self.channels = window.shape

    def read(self, head: Any, tokens: Any, columns: Any) -> Float[Array, "tokens columns"]:
        """Return rows in fp32.

        Args:
            tokens: an array of tokens of the unit, or a slice `pl.ds` of tokens that are contiguous
                in the ring.
        """
        return self.stored(head, tokens, columns).astype(jnp.float32)

    def stored(self, head: Any, tokens: Any, columns: Any) -> Float[Array, "tokens columns"]:
        """Return rows in their own dtype."""
        several = isinstance(tokens, pl.Slice)
        first = self._slot + (tokens.start if several else tokens)
        first = jnp.where(first < self.slots, first, first - self.slots)
        rows = self._window[head, pl.ds(first, tokens.size) if several else first, columns]
        if self._new is None:
            return rows
        slots = first + lax.broadcasted_iota(jnp.int32, (tokens.size,), 0) if several else first
        new_slot, row = self._new
        return jnp.where((slots == new_slot)[:, None], row[head, columns], rows)


class WindowOfHead:
    """The rows of one head of a window in their own dtype, indexed by slots and columns."""

    def __init__(self, source: Source, head: Any):
        self._source, self._head, self.slots = source, head, source.slots

    def __getitem__(self, index: tuple[Any, Any]) -> Float[Array, "slots columns"]:
        return self._source.stored(self._head, *index)


class _Rows:
    """The rows of a source, indexed as kernel.py indexes a group of tokens [1, group, H] or a span
    [SPAN, H].
    """

    def __init__(self, source: Source, head: Any):
        self._source, self._head = source, head

    def __getitem__(self, index: tuple[Any, ...]) -> Array:
        tokens, columns = index if len(index) == 2 else (pl.ds(index[1], 1), index[2])
        return self._source.read(self._head, tokens, columns)


@dataclasses.dataclass(frozen=True)
class GroupedBlocks(BlockWriter):
    """Uniform groups, with the arithmetic of kernel.py. A unit is a group of tokens, or a span.

    arrays: the words of each plane set [B, K, S / n, w], scale and, if the reader takes one, zero.
    inputs: the divisor [B, K, 1, H], fp32, if the job has one.
    """

    job: Job

    @property
    def unit(self) -> int:
        return self.job.reader.group if self._over_tokens else SPAN

    @property
    def warps(self) -> int:
        if self._over_tokens:
            return 1
        channels = self.job.reader.layout.channels
        return pl.next_power_of_2(pl.cdiv(channels, QUANTIZE_TUNING.warp_channels))

    @property
    def _over_tokens(self) -> bool:
        return self.job.reader.axis == "tokens"

    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        check_format(ring[:, :, :block], self.job.reader, self.job.scheme, self.job.bits)

    def write(
        self,
        program: Any,
        head: Any,
        source: Source,
        place: Any,
        inputs: Sequence[Any],
        arrays: Sequence[Any],
    ) -> None:
        divisor = [RefView(ref, lambda rows, columns: (head, rows, columns)) for ref in inputs]
        views, kernel = (
            (self._token_views, token_kernel)
            if self._over_tokens
            else (self._channel_views, channel_kernel)
        )
        kernel(_Rows(source, head), *divisor, *views(head, place, arrays), job=self.job)

    def _token_views(self, head: Any, place: Any, arrays: Sequence[Any]) -> list[RefView]:
        """Return the views of a group of tokens: arrays [1, group / slots, w] and [1, H]."""
        reader = self.job.reader
        row, group = place // reader.layout.slots, place // reader.group
        sets = len(reader.layout.sets)
        words = [
            RefView(ref, lambda _, i, columns: (head, pl.ds(row + i, 1), columns))
            for ref in arrays[:sets]
        ]
        return words + [
            RefView(ref, lambda _, columns: (head, pl.ds(group, 1), columns))
            for ref in arrays[sets:]
        ]

    def _channel_views(self, head: Any, place: Any, arrays: Sequence[Any]) -> list[RefView]:
        """Return the views of a span whose groups run over channels: arrays [SPAN / slots, w] and
        [H / group, SPAN].
        """
        slots, sets = self.job.reader.layout.slots, len(self.job.reader.layout.sets)
        row, count = place // slots, SPAN // slots
        words = [
            RefView(ref, lambda _, columns: (head, pl.ds(row, count), columns))
            for ref in arrays[:sets]
        ]
        return words + [
            RefView(
                ref, lambda group, tokens: (head, group, pl.ds(place + tokens.start, tokens.size))
            )
            for ref in arrays[sets:]
        ]


@dataclasses.dataclass(frozen=True)
class RowBlocks(BlockWriter):
    """Rows in full precision, behind windows. A block is copied.

    arrays: the body [B, K, S, H]. inputs: none.
    """

    tokens: int  # of a unit, a power of two

    @property
    def unit(self) -> int:
        return self.tokens

    @property
    def run(self) -> int:
        return 1

    def check(self, ring: Float[Array, "B K R H"], block: int) -> None:
        if block % self.tokens:
            raise ValueError(f"blocks of {block} tokens are not whole runs of {self.tokens}")

    def write(
        self,
        program: Any,
        head: Any,
        source: Source,
        place: Any,
        inputs: Sequence[Any],
        arrays: Sequence[Any],
    ) -> None:
        [body], tokens = arrays, lax.broadcasted_iota(jnp.int32, (self.tokens,), 0)
        rows = source.read(head, tokens, pl.ds(0, source.channels))
        body[head, pl.ds(place, self.tokens), :] = rows.astype(body.dtype)
