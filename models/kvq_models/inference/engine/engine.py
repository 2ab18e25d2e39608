"""The engine: requests wait in a queue, are prefilled in chunks between steps, decode in a slot,
and leave as soon as they are done.

    engine = Engine(llama, "kivi:bits=4", slots=8, capacity=4096)
    ticket = engine.submit(Request(tuple(ids), max_new_tokens=64))
    while not engine.idle:
        for event in engine.advance(): ...

One cache has a row for each slot, and one more row takes the prompt that is being read. Shapes
never change: `step_slots` and `fill_slot` compile once, a prefill once per width. One call of
`step_slots` takes several steps (steps.py). A request's tokens depend on the request alone, bit for
bit. Drive an engine from one thread.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.cache import init_cache, layout
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.placement.placement import Placement
from kvq_models.inference.decoding import implementations
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import Accepted, Counts
from kvq_models.inference.engine.compiling import IDLE_SECONDS, Compiler, compile_at_once
from kvq_models.inference.engine.limits import MAX_ATTEMPTS, QUEUE_LIMIT
from kvq_models.inference.engine.prefix_rows import PrefixRows
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.reading import chunk_of, kinds_of, read_chunk
from kvq_models.inference.engine.requests import Ended, Event, QueueFullError, Request, Ticket
from kvq_models.inference.engine.steps import step, steps_of_call
from kvq_models.inference.engine.sweep import Sweep
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.row_sampling import Drawn, row_rules
from kvq_models.llama.flat_llama import FlatLlama
from kvq_models.llama.model import Llama

# widths of the prefill programs; the last is the longest chunk that other requests wait for
WIDTHS = (64, 96, 128, 192, 256)

_log = logging.getLogger("kvq.engine")


class Engine:
    """B slots on one cache.

    placement: the mesh of the slots' cache, on which the model lies too. Heads and tokens can be
    split. Rows cannot, because a prompt is read in a cache of one row. Prefixes are kept only for
    caches on one device.

    prefixes: a store of prompts' caches, used for prompts that begin alike, with the same bits.
    Prompts whose log-probabilities are requested are always read.

    steps: most steps of the slots in one `advance`; a new request waits for its end, at most about
    a tenth of a second if a step is shorter.

    verify: look for damaged memory, and compute it again (sweep.py).

    Raises ValueError, in one line, if the cache does not fit the model or its parameters are
    missing.
    """

    def __init__(
        self,
        llama: Llama,
        spec: CacheSpec | str,
        *,
        slots: int,
        capacity: int,
        dtype: DTypeLike | None = None,
        queue_limit: int = QUEUE_LIMIT,
        widths: Sequence[int] = WIDTHS,
        steps: int = programs.STEPS,
        implementation: Implementation = None,
        prefixes: PrefixStore | None = None,
        placement: Placement | None = None,
        verify: bool = False,
    ):
        if queue_limit < 1 or not widths or min(widths) < 1 or not 0 < steps <= programs.STEPS:
            raise ValueError(
                "a queue holds at least one request, a chunk at least one token, and a call takes"
                f" 1 to {programs.STEPS} steps: {queue_limit=}, {widths=}, {steps=}"
            )
        if placement is not None and (prefixes is not None or placement.size("rows") > 1):
            given = f"{placement}{'' if prefixes is None else ' and a store of prefixes'}"
            raise ValueError(
                f"slots on a mesh split heads and tokens and keep no prefixes: got {given}"
            )
        self.llama, self._model, self.queue_limit = llama, FlatLlama(llama), queue_limit
        self.implementation: Implementation = implementation
        self.steps, self._step_seconds = steps, math.inf
        self.widths = tuple(sorted({min(width, capacity) for width in widths}))
        self._row_layout = layout(spec, llama.config, 1, capacity, dtype, placement)
        self.capacity, self.placement, self.prefixes = capacity, placement, prefixes
        self._slots: list[Accepted | None] = [None] * slots
        self._allocate()
        parameters_for(llama, self.cache.spec)
        implementations(self.cache, implementation)
        self._rows: PrefixRows | None = None
        if prefixes is not None:
            self._rows = PrefixRows(prefixes, self._row, llama, self.widths, implementation)
        self._sweep = Sweep() if verify else None
        self._compiler: Compiler | None = None
        self.counts, self._tickets = Counts(), itertools.count()
        self._queue: deque[Accepted] = deque()
        # the reserved slot, and the request whose prompt is being read
        self._reading: tuple[int, Accepted] | None = None

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Number of taken slots, with the one reserved for the prompt being read."""
        return sum(accepted is not None for accepted in self._slots) + (self._reading is not None)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.busy

    @property
    def nbytes(self) -> int:
        """Bytes of the slots' cache and of the row in which prompts are read."""
        return nbytes(self.cache) + nbytes(self._row)

    def live_tokens(self) -> int:
        """Return the number of tokens that the cache holds for running requests. Any thread may
        call it. Queued requests hold none."""
        running = *self._slots, self._reading and self._reading[1]
        return sum(accepted.tokens_held for accepted in running if accepted is not None)

    def warm_up(self, *, wait: bool = True) -> None:
        """Compile every program except those that score prompts, which are compiled beside other
        requests when they are asked for.

        Without `wait`, return once short prompts can be served. A thread continues with wider
        chunks, and prompts that need one of them wait for it while other requests are served.
        """
        if not self.idle:
            raise ValueError("an engine is warmed up before it has requests")
        rows, sweep = self._rows, self._sweep
        self._rows = self._sweep = None  # the requests of the warm-up are neither kept nor verified
        try:
            buffers = self.cache, self._row, self._offsets, self._no_logits
            beside = () if rows is None else (lambda: rows.scope,)
            compile_at_once(self._model, *buffers, self.widths[0], self.implementation, beside)
            for request in (Request((0,) * self.widths[0], 0), Request((0,), 2)):
                self.submit(request)
                while not self.idle:
                    self.advance()
        finally:
            self._rows, self._sweep = rows, sweep
        if sweep is not None:
            sweep.compile(self.cache, self._row)
        self.counts = Counts()
        self._compiler = Compiler(self.llama, self._row_layout, self.implementation, self.widths[0])
        wider = [(width, False) for width in self.widths[1:]]
        self._compiler.start(wider)
        if wait:
            while not self._compiler.ready(wider):
                self._compiler.wait()

    @property
    def compiling(self) -> bool:
        """True while a thread compiles programs."""
        return self._compiler is not None and self._compiler.busy

    def reset(self) -> None:
        """Forget all requests and begin with empty caches, after `advance` has raised."""
        self._queue.clear()
        self._reading, self._slots = None, [None] * self.slots
        for leaf in jax.tree.leaves((self.cache, self._row, self._offsets)):
            leaf.delete()  # there may be no room for two
        self._allocate()
        if self._sweep is not None:
            self._sweep.forget()

    def _allocate(self) -> None:
        rows, capacity, dtype = self.slots, self.capacity, self._row_layout.dtype
        spec, dims, placement = self._row_layout.spec, self.llama.config, self.placement
        self.cache = init_cache(spec, dims, rows, capacity, dtype, placement)
        self._row = init_cache(spec, dims, 1, capacity, dtype, placement)
        self._no_logits = jax.device_put(np.zeros((1, dims.vocab_size), np.float32))
        self._offsets = programs.no_offsets(rows, dims.vocab_size, placement)

    def submit(self, request: Request) -> Ticket:
        """Accept a request. Raises ValueError if it does not fit the model or the capacity,
        QueueFullError if all slots are taken, or will be, and the queue is full."""
        request.check(self.llama.config.vocab_size, self.capacity)
        accepted = sum(not accepted.cancelled for accepted in self._accepted())
        if accepted >= self.slots + self.queue_limit:
            raise QueueFullError(accepted - self.slots, self.queue_limit)
        ticket = next(self._tickets)
        self._queue.append(Accepted(ticket, request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request, wherever it is. Its last event comes with the next `advance`. No effect
        on a request that has ended."""
        for accepted in self._accepted():
            accepted.cancelled |= accepted.ticket == ticket

    def _accepted(self) -> Iterator[Accepted]:
        yield from self._queue
        yield from (accepted for accepted in self._slots if accepted is not None)
        if self._reading is not None:
            yield self._reading[1]

    def advance(self) -> list[Event]:
        """Read at most one chunk of a prompt, then take one step of all slots, or several if no
        prompt waits. Return the events."""
        renewed = () if self._sweep is None else self._renew_damaged(self._sweep)
        return [*self._drop_cancelled(), *renewed, *self._read_chunk(), *self._step()]

    def _drop_cancelled(self) -> Iterator[Event]:
        for accepted in [accepted for accepted in self._queue if accepted.cancelled]:
            self._queue.remove(accepted)
            yield Ended(accepted.ticket, "cancelled")
        for slot, accepted in enumerate(self._slots):
            if accepted is not None and accepted.cancelled:
                self._slots[slot] = None
                yield Ended(accepted.ticket, "cancelled")
        if self._reading and self._reading[1].cancelled:
            yield Ended(self._stop_reading(*self._reading).ticket, "cancelled")

    def _renew_damaged(self, sweep: Sweep) -> Iterator[Event]:
        """Let requests whose memory was damaged begin again, before the others in the queue."""
        for slot in sweep.damaged(self.cache, self._slots):
            accepted, self._slots[slot] = self._slots[slot], None
            if accepted is not None:
                yield from self._renew(accepted, slot)
        if self._reading is not None and sweep.row_damaged(self._row, self._reading[1]):
            slot = self._reading[0]
            yield from self._renew(self._stop_reading(*self._reading), slot)

    def _renew(self, accepted: Accepted, slot: int) -> Iterator[Event]:
        """Compute a request again, or end it at its last attempt: broken memory lasts."""
        self.counts.damaged += 1
        _log.error("memory of a request was damaged at attempt %d", accepted.attempts)
        if accepted.attempts < MAX_ATTEMPTS:
            accepted.begin_again(slot)
            self._queue.appendleft(accepted)
        else:
            yield Ended(accepted.ticket, "damaged")

    def _stop_reading(self, slot: int, accepted: Accepted) -> Accepted:
        """Put the half-read row into the slot, which stays vacant. An empty row comes back."""
        self._fill(slot, self._no_logits, accepted)
        self._reading = None
        return accepted

    def _read_chunk(self) -> Iterator[Event]:
        logits = None
        if self._reading is None:
            vacant = [slot for slot, accepted in enumerate(self._slots) if accepted is None]
            ready = (yield from self._next()) if vacant else None
            if ready is None:
                return
            self._queue.remove(ready)
            self._reading = min(vacant, key=lambda slot: slot == ready.damaged_in), ready
            logits = self._begin_reading(ready)
        slot, accepted = self._reading
        if accepted.read < len(accepted.request.prompt):
            logits = self._prefill(accepted)
            if accepted.read < len(accepted.request.prompt):
                return
        assert logits is not None, "logits come with the last chunk"
        self._reading = None
        yield from self._begin_decoding(slot, accepted, logits)

    def _begin_reading(self, accepted: Accepted) -> jax.Array | None:
        """Prepare the row for a prompt. Return the logits after its stored beginning, if any."""
        if self._sweep is not None:
            self._row = self._sweep.empty(self._row, self.counts)
        if self._rows is None or accepted.request.prompt_logprobs:
            return None
        known = self._rows.recall(accepted.request, self._row)
        accepted.keys, self._row = known.keys, known.row
        accepted.read = accepted.stored = known.length
        self.counts.add_lookup(known.length)
        return known.logits

    def _begin_decoding(self, slot: int, accepted: Accepted, logits: jax.Array) -> Iterator[Event]:
        """Move a prompt from the row into its slot, and draw its first token from the logits."""
        if self._sweep is not None:
            self._sweep.fill(self.cache, slot, self._row, accepted)
        drawn = self._fill(slot, logits, accepted)
        finite = drawn.finite[0] and np.isfinite(accepted.logprobs).all()
        if finite and not accepted.replayed:
            yield accepted.prompt_event()
        reason = "length" if finite else "not-finite"
        if finite and accepted.request.max_new_tokens:
            events, reason = accepted.take(drawn, 0)
            self.counts.new_tokens += 1
            yield from events
        if reason is None:
            self._slots[slot] = accepted
        else:
            yield Ended(accepted.ticket, reason)

    def _next(self) -> Generator[Event, None, Accepted | None]:
        """Return the first request in the queue whose programs are compiled. Yield the ends of
        those whose programs cannot be."""
        if self._compiler is None:
            return self._queue[0] if self._queue else None
        ready = list[Accepted]()
        for accepted in list(self._queue):
            try:
                kinds = kinds_of(accepted, self.widths)
                if self._compiler.ready(kinds, first=accepted is self._queue[0]):
                    ready.append(accepted)
            except Exception:
                _log.exception("a program for a prompt cannot be compiled")
                self._queue.remove(accepted)
                yield Ended(accepted.ticket, "failed")
        self._compiler.forget_failed()
        if self._queue and not ready and not any(self._slots):
            self._compiler.wait(IDLE_SECONDS)
        return ready[0] if ready else None

    def _prefill(self, accepted: Accepted) -> jax.Array:
        """Read the next chunk of a prompt and return the logits [1, V] after it."""
        count, width = chunk_of(accepted, accepted.read, self.widths)
        logits, self._row = read_chunk(
            self.llama, self._row, accepted, count, width, self.implementation
        )
        # on a mesh: otherwise a cancelled row would be filled by another program
        if not accepted.request.prompt_logprobs and logits.sharding != self._no_logits.sharding:
            self._no_logits = jax.device_put(np.zeros(logits.shape, np.float32), logits.sharding)
        if self._sweep is not None:
            self._sweep.seal_row(self._row, accepted)
        if self._rows is not None and accepted.keys:
            before = accepted.read - count
            self._rows.keep(accepted.keys, self._row, before, accepted.read, logits)
        self.counts.chunks += 1
        self.counts.prompt_tokens += count
        return logits

    def _fill(self, slot: int, logits: jax.Array, accepted: Accepted) -> Drawn:
        drawn, self.cache, self._row, self._offsets = programs.fill_slot(
            self.cache,
            self._row,
            self._offsets,
            np.int32(slot),
            logits,
            programs.padded_bias(accepted.request.bias),
            row_rules([accepted.rule]),
        )
        return jax.tree.map(np.asarray, drawn)

    def _step(self) -> Iterator[Event]:
        """Take the steps of one call, one step if a prompt comes next."""
        if not any(self._slots):
            return
        reads = self._reading is not None or (self._queue and None in self._slots)
        count = steps_of_call(self._slots, 1 if reads else self.steps, self._step_seconds)
        began = time.perf_counter()
        steps, self.cache, self._offsets = step(
            self._model, self.cache, self._offsets, self._slots, count, self.implementation
        )
        self._step_seconds = (time.perf_counter() - began) / count
        self.counts.steps += count
        for drawn in steps:
            for slot, accepted in enumerate(self._slots):
                if accepted is not None:
                    yield from self._take(slot, accepted, drawn)

    def _take(self, slot: int, accepted: Accepted, drawn: Drawn) -> Iterator[Event]:
        """Give a request the token of its slot. If it ends, it leaves, or begins again if its
        memory was damaged."""
        self.counts.new_tokens += bool(drawn.finite[slot])
        events, reason = accepted.take(drawn, slot)
        yield from events
        if reason is None:
            return
        self._slots[slot] = None
        answered = reason in ("ended", "length")
        if answered and self._sweep and self._sweep.slot_damaged(self.cache, slot, accepted):
            yield from self._renew(accepted, slot)
        else:
            yield Ended(accepted.ticket, reason)
