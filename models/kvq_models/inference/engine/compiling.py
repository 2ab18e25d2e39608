"""Compile an engine's prefill programs beside it, while its other requests decode."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeAlias

import jax
import numpy as np

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine import programs
from kvq_models.llama.model import Llama

Kind: TypeAlias = tuple[int, bool]  # the width of a program, and True if it scores the prompt


class Compiler:
    """A thread that compiles programs one after the other. It holds a row of the cache while it is
    at work. row: the layout of a prompt's row."""

    def __init__(self, llama: Llama, row: Cache, implementation: Implementation):
        self._llama, self._layout, self._implementation = llama, row, implementation
        self._at_work = threading.Lock()
        self.programs: dict[Kind, Future[None]] = {}
        self._next: list[Kind] = []  # those that did not begin
        self._order = threading.Lock()  # of `_next`

    @property
    def busy(self) -> bool:
        return not all(future.done() for future in self.programs.values())

    def start(self, kinds: Iterable[Kind]) -> None:
        """Compile those that were not asked for before, in their order."""
        new: dict[Kind, Future[None]] = {
            kind: Future() for kind in kinds if kind not in self.programs
        }
        self.programs |= new
        with self._order:
            self._next += new
        if new:
            threading.Thread(target=self._compile, name="kvq-compiling", daemon=True).start()

    def ready(self, kinds: Iterable[Kind], *, first: bool = False) -> bool:
        """Return True if all of these are compiled. The others are compiled after those that were
        asked for before, or `first`. Raises what a compilation has raised."""
        wanted = list(kinds)
        self.start(wanted)
        if first:
            with self._order:
                self._next.sort(key=lambda kind: kind not in wanted)
        futures = [self.programs[kind] for kind in wanted]
        done = [future for future in futures if future.done()]
        for future in done:
            future.result()
        return len(done) == len(futures)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until one more program is compiled, or for so many seconds."""
        left = [future for future in self.programs.values() if not future.done()]
        concurrent.futures.wait(left, seconds, concurrent.futures.FIRST_COMPLETED)

    def _compile(self) -> None:
        row = None
        with self._at_work:
            while (kind := self._begun()) is not None:
                try:
                    row = self._run(row or self._empty(), *kind)
                    self.programs[kind].set_result(None)
                except Exception as error:
                    row = None  # it may have been consumed
                    self.programs[kind].set_exception(error)

    def _begun(self) -> Kind | None:
        with self._order:
            return self._next.pop(0) if self._next else None

    def _run(self, row: Cache, width: int, scores: bool) -> Cache:
        """Run a program, which compiles it, and return an empty row."""
        tokens, lengths = np.zeros((1, width), np.int32), np.array([1], np.int32)
        if scores:
            *_, row = programs.score_chunk(
                self._llama, row, tokens, lengths, tokens, self._implementation
            )
        else:
            _, row = programs.prefill_chunk(
                self._llama, row, tokens, lengths, False, self._implementation
            )
        none = jax.device_put(np.zeros(1, np.int32), self._layout.lengths.sharding)
        return dataclasses.replace(row, lengths=none)

    def _empty(self) -> Cache:
        return jax.tree.map(
            lambda one: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding), self._layout
        )
