"""Compile an engine's programs: those of every request at once, before the first one, and those of
longer prompts in the background, while its other requests decode."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.cache import Cache
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import VACANT
from kvq_models.inference.engine.steps import slot_inputs
from kvq_models.inference.prompts import lowered_prompt, read_prompt
from kvq_models.inference.row_sampling import row_rules
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama

IDLE_SECONDS = 0.05  # how long an engine without running requests waits for a program

Kind: TypeAlias = tuple[int, bool]  # the width of a program, and True if it scores the prompt


def compile_at_once(
    model: FlatLlama,
    cache: Cache,
    row: Cache,
    offsets: programs.Offsets,
    logits: Float[Array, "1 V"],
    width: int,
    implementation: Implementation,
    beside: Iterable[Callable[[], object]] = (),
) -> None:
    """Compile the programs that read a prompt of this width, fill a slot and step, on two threads:
    XLA holds no lock of Python's while it compiles, or loads what it has compiled before. Nothing
    is consumed. On a mesh nothing is compiled, because outputs decide the shardings of the next
    program's inputs. beside: other work for these threads."""
    llama = model.llama()
    vacant = row_rules([VACANT])
    step = slot_inputs([None] * cache.batch), np.int32(1)
    chunk = np.zeros((1, width), np.int32), np.zeros(1, np.int32)
    with ThreadPoolExecutor(2) as threads:
        done: list[Future[Any]] = [threads.submit(work) for work in beside]
        if cache.placement is None:
            for lowered in (
                # the one that takes longest begins first
                lambda: [programs.step_slots.lower(model, cache, offsets, *step, implementation)],
                lambda: lowered_prompt(llama, row, *chunk, implementation=implementation),
                lambda: [
                    programs.fill_slot.lower(
                        cache, row, offsets, np.int32(0), logits, programs.padded_bias(()), vacant
                    )
                ],
            ):
                done += [threads.submit(program.compile) for program in lowered()]
        for future in done:
            future.result()


class Compiler:
    """A thread that compiles programs one after the other. It holds a row of the cache while it is
    at work. row: the layout of a prompt's row. width: the width of the compiled program."""

    def __init__(self, llama: Llama, row: Cache, implementation: Implementation, width: int):
        self._llama, self._layout = llama, row
        self._implementation: Implementation = implementation
        self._at_work = threading.Lock()
        compiled = Future[None]()
        compiled.set_result(None)
        self.programs: dict[Kind, Future[None]] = {(width, False): compiled}
        self._next: list[Kind] = []  # programs whose compilation did not begin
        self._order = threading.Lock()  # guards `_next`

    @property
    def busy(self) -> bool:
        return not all(future.done() for future in list(self.programs.values()))

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

    def forget_failed(self) -> None:
        """Let programs whose compilation has failed be compiled again when they are asked for: the
        memory that was missing may be there then."""
        for kind, future in list(self.programs.items()):
            if future.done() and future.exception() is not None:
                del self.programs[kind]

    def wait(self, seconds: float | None = None) -> None:
        """Wait until one more program is compiled, or until the time is over."""
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
            _, row = read_prompt(
                self._llama, row, tokens, lengths, implementation=self._implementation
            )
        none = jax.device_put(np.zeros(1, np.int32), self._layout.lengths.sharding)
        return dataclasses.replace(row, lengths=none)

    def _empty(self) -> Cache:
        return jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
            self._layout,
        )
