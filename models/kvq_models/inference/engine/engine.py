"""The engine: requests wait in a queue, are prefilled in chunks between steps, decode in a slot,
and leave as soon as they are done.

    engine = Engine(llama, "kivi:bits=4", slots=8, capacity=4096)
    ticket = engine.submit(Request(tuple(ids), max_new_tokens=64))
    while not engine.idle:
        for event in engine.advance(): ...

One cache has a row for each slot, and one more row takes the prompt that is being read. Shapes
never change: `step_slots` and `fill_slot` compile once, a prefill once per width. A request's
tokens depend on the request alone, bit for bit: its prompt is cut into the same chunks whatever
else is running, and rows do not see each other.

Drive an engine from one thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax.typing import DTypeLike

from kvq_jax.attention.dispatch import Implementation
from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.cache import init_cache, layout
from kvq_jax.cache.serialization import fingerprint
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.placement.placement import Placement
from kvq_models.inference.decoding import implementations
from kvq_models.inference.engine import programs
from kvq_models.inference.engine.accepted import VACANT, Accepted, Counts
from kvq_models.inference.engine.pieces import RowPieces
from kvq_models.inference.engine.prefixes import PrefixStore, chunk_keys, scope_of
from kvq_models.inference.engine.requests import (
    Ended,
    Event,
    PromptRead,
    QueueFullError,
    Reason,
    Request,
    Ticket,
    Token,
)
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.row_sampling import Drawn, row_rules
from kvq_models.llama.model import Llama

# of prefill programs; the last is the longest chunk that other requests wait for
WIDTHS = (64, 128, 256)
QUEUE_LIMIT = 64


class Engine:
    """B slots on one cache.

    placement: the mesh of the slots' cache, on which the model lies too. Heads and tokens can be
    split. Rows cannot, because a prompt is read in a cache of one row. Prefixes are kept only for
    caches on one device.

    prefixes: a store of prompts' caches, used for prompts that begin alike. They have the same bits
    as reading the prompt again. The model's weights are hashed once for it. Prompts whose
    log-probabilities are requested are always read.

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
        implementation: Implementation = None,
        prefixes: PrefixStore | None = None,
        placement: Placement | None = None,
    ):
        if queue_limit < 1 or not widths or min(widths) < 1:
            raise ValueError(
                "a queue holds at least one request, and a chunk at least one token:"
                f" {queue_limit=}, {widths=}"
            )
        if placement is not None and (prefixes is not None or placement.size("rows") > 1):
            kept = "" if prefixes is None else " and a store of prefixes"
            raise ValueError(
                "slots on a mesh split heads and tokens and keep no prefixes: got"
                f" {placement}{kept}"
            )
        self.llama, self.queue_limit, self.implementation = llama, queue_limit, implementation
        self.widths = tuple(sorted({min(width, capacity) for width in widths}))
        self.cache = init_cache(spec, llama.config, slots, capacity, dtype, placement)
        self._row = init_cache(spec, llama.config, 1, capacity, dtype, placement)
        parameters_for(llama, self.cache.spec)
        implementations(self.cache, implementation)
        self._row_layout = layout(spec, llama.config, 1, capacity, dtype, placement)
        self.prefixes = prefixes
        if prefixes is not None:
            self._pieces = RowPieces(self._row)
            self._scope = scope_of(self._row, fingerprint(llama), self.widths, implementation)
        self._compiling: dict[int, Future[None]] = {}
        self.counts = Counts()
        self._tickets = itertools.count()
        self._queue: deque[Accepted] = deque()
        # the reserved slot, and the request whose prompt is being read
        self._reading: tuple[int, Accepted] | None = None
        self._slots: list[Accepted | None] = [None] * slots
        self._no_logits = jax.device_put(np.zeros((1, llama.config.vocab_size), np.float32))

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Number of taken slots, including the one reserved for the prompt being read."""
        return sum(accepted is not None for accepted in self._slots) + (self._reading is not None)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.busy

    @property
    def nbytes(self) -> int:
        """Bytes of the slots' cache and of the row in which prompts are read."""
        return nbytes(self.cache) + nbytes(self._row)

    def live_tokens(self) -> int:
        """Return the number of tokens that the cache holds for requests."""
        accepted = [*self._slots, self._reading[1] if self._reading else None]
        return sum(one.read + max(0, one.drawn - 1) for one in accepted if one)

    def warm_up(self, *, wait: bool = True) -> None:
        """Compile every program except those that score prompts.

        Without `wait`, return once short prompts can be served. A thread continues with wider
        chunks, and prompts that need one of them wait for it while other requests decode. The
        thread holds a separate row of the cache until it is done.
        """
        if not self.idle:
            raise ValueError("an engine is warmed up before it has requests")
        store, self.prefixes = self.prefixes, None
        for request in (
            Request((0,) * self.widths[0], max_new_tokens=0),
            Request((0,), max_new_tokens=2),
        ):
            self.submit(request)
            while not self.idle:
                self.advance()
        self.counts, self.prefixes = Counts(), store
        self._compiling = {width: Future() for width in self.widths[1:]}
        thread = threading.Thread(
            target=self._compile, args=(dict(self._compiling),), name="kvq-compiling", daemon=True
        )
        thread.start()
        if wait:
            thread.join()
            for future in self._compiling.values():
                future.result()

    @property
    def compiling(self) -> bool:
        """True while the thread of `warm_up` is at work."""
        return not all(future.done() for future in self._compiling.values())

    def _compile(self, widths: dict[int, Future[None]]) -> None:
        row = None
        for width, future in widths.items():
            try:
                row = row or jax.tree.map(
                    lambda one: jax.device_put(np.zeros(one.shape, one.dtype), one.sharding),
                    self._row_layout,
                )
                tokens, lengths = np.zeros((1, width), np.int32), np.array([1], np.int32)
                _, row = programs.prefill_chunk(
                    self.llama, row, tokens, lengths, False, self.implementation
                )
                row = dataclasses.replace(
                    row,
                    lengths=jax.device_put(
                        np.zeros(1, np.int32), self._row_layout.lengths.sharding
                    ),
                )
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

    def submit(self, request: Request) -> Ticket:
        """Accept a request. Raises ValueError if it does not fit the model or the capacity,
        QueueFullError if the queue is full."""
        request.check(self.llama.config.vocab_size, self.capacity)
        if self.waiting >= self.queue_limit:
            raise QueueFullError(self.waiting, self.queue_limit)
        ticket = next(self._tickets)
        self._queue.append(Accepted(ticket, request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request, wherever it is. Its last event comes with the next `advance`. No effect
        on a request that has ended."""
        for accepted in (*self._queue, *self._slots, self._reading[1] if self._reading else None):
            if accepted is not None and accepted.ticket == ticket:
                accepted.cancelled = True

    def advance(self) -> list[Event]:
        """Read at most one chunk of a prompt, then take one step of all slots. Return the
        events."""
        events: list[Event] = []
        self._drop_cancelled(events)
        self._read_chunk(events)
        self._step(events)
        return events

    def _drop_cancelled(self, events: list[Event]) -> None:
        for accepted in [accepted for accepted in self._queue if accepted.cancelled]:
            self._queue.remove(accepted)
            self._end(accepted, "cancelled", events)
        for slot, accepted in enumerate(self._slots):
            if accepted is not None and accepted.cancelled:
                self._slots[slot] = None
                self._end(accepted, "cancelled", events)
        if self._reading and self._reading[1].cancelled:
            slot, accepted = self._reading
            # Its half-read row goes into the slot, which stays vacant. An empty row comes back.
            self._fill(slot, self._no_logits, accepted)
            self._reading = None
            self._end(accepted, "cancelled", events)

    def _read_chunk(self, events: list[Event]) -> None:
        logits = None
        if self._reading is None:
            vacant = [slot for slot, accepted in enumerate(self._slots) if accepted is None]
            if not self._queue or not vacant:
                return
            self._reading = vacant[0], self._queue.popleft()
            logits = self._recall(self._reading[1])
        slot, accepted = self._reading
        if accepted.read < len(accepted.request.prompt):
            compiled = self._compiling.get(self._chunk(accepted)[1])
            if compiled is not None and not accepted.request.prompt_logprobs:
                if not compiled.done() and any(self._slots):
                    return  # other requests continue
                compiled.result()
            logits = self._prefill(accepted)
            if accepted.read < len(accepted.request.prompt):
                return
        assert logits is not None, "logits come with the last chunk"
        self._reading = None
        drawn = self._fill(slot, logits, accepted)
        events.append(PromptRead(accepted.ticket, tuple(accepted.logprobs), tuple(accepted.likely)))
        if accepted.request.max_new_tokens == 0:
            self._end(accepted, "length", events)
        elif self._take(accepted, drawn, 0, events):
            self._slots[slot] = accepted

    def _chunk(self, accepted: Accepted) -> tuple[int, int]:
        """Return the number of prompt tokens to read next, and the width of the program that reads
        them."""
        count = min(len(accepted.request.prompt) - accepted.read, self.widths[-1])
        return count, next(width for width in self.widths if width >= count)

    def _recall(self, accepted: Accepted) -> jax.Array | None:
        """Fill the prompt row with the stored beginning of a prompt. Return the logits after it, or
        None."""
        if self.prefixes is None or accepted.request.prompt_logprobs:
            return None
        accepted.keys = chunk_keys(self._scope, accepted.request.prompt, self.widths[-1])
        pieces = self.prefixes.longest(accepted.keys)
        self.counts.prefix_lookups += 1
        if not pieces:
            return None
        for leaf in jax.tree.leaves(self._row):
            leaf.delete()  # there is never a third row
        self._row = self._pieces.joined(pieces)
        accepted.read = pieces[-1].length
        self.counts.prefix_hits += 1
        self.counts.prefix_tokens += accepted.read
        return jax.device_put(pieces[-1].logits)

    def _remember(self, accepted: Accepted, before: int, logits: jax.Array) -> None:
        """Store the chunk that was read after `before` tokens."""
        if self.prefixes is not None and accepted.keys:
            chain = accepted.keys[: before // self.widths[-1] + 1]
            self.prefixes.put(chain, self._pieces.cut(self._row, before, accepted.read, logits))

    def _prefill(self, accepted: Accepted) -> jax.Array:
        """Read the next chunk of a prompt and return the logits [1, V] after it."""
        prompt, (count, width) = accepted.request.prompt, self._chunk(accepted)
        tokens, following = np.zeros((2, 1, width), np.int32)
        tokens[0, :count] = prompt[accepted.read : accepted.read + count]
        lengths = np.array([count], np.int32)
        if accepted.request.prompt_logprobs:
            after = prompt[accepted.read + 1 : accepted.read + 1 + count]
            following[0, : len(after)] = after
            logits, scores, self._row = programs.score_chunk(
                self.llama, self._row, tokens, lengths, following, self.implementation
            )
            accepted.add_scores(len(after), *(np.asarray(score) for score in scores))
        else:
            logits, self._row = programs.prefill_chunk(
                self.llama, self._row, tokens, lengths, False, self.implementation
            )
            # on a mesh: otherwise a cancelled row would be filled by another program
            if logits.sharding != self._no_logits.sharding:
                self._no_logits = jax.device_put(
                    np.zeros(logits.shape, np.float32), logits.sharding
                )
        accepted.read += count
        self._remember(accepted, accepted.read - count, logits)
        self.counts.chunks += 1
        self.counts.prompt_tokens += count
        return logits

    def _fill(self, slot: int, logits: jax.Array, accepted: Accepted) -> Drawn:
        drawn, self.cache, self._row = programs.fill_slot(
            self.cache, self._row, np.int32(slot), logits, row_rules([accepted.rule])
        )
        return jax.tree.map(np.asarray, drawn)

    def _step(self, events: list[Event]) -> None:
        active = np.array([accepted is not None for accepted in self._slots])
        if not active.any():
            return
        tokens = np.array([accepted.last if accepted else 0 for accepted in self._slots], np.int32)
        rules = row_rules([accepted.rule if accepted else VACANT for accepted in self._slots])
        drawn, self.cache = programs.step_slots(
            self.llama, self.cache, tokens, active, rules, self.implementation
        )
        drawn = jax.tree.map(np.asarray, drawn)
        self.counts.steps += 1
        for slot, accepted in enumerate(self._slots):
            if accepted is not None and not self._take(accepted, drawn, slot, events):
                self._slots[slot] = None

    def _take(self, accepted: Accepted, drawn: Drawn, row: int, events: list[Event]) -> bool:
        """Give a request the token that was drawn in a row. Return True if it continues."""
        if not drawn.finite[row]:
            return self._end(accepted, "not-finite", events)
        asked = accepted.request
        accepted.last, accepted.drawn = int(drawn.token[row]), accepted.drawn + 1
        self.counts.new_tokens += 1
        most = asked.alternatives
        likely = tuple(
            zip(
                drawn.likely[row, :most].tolist(),
                drawn.likely_logprobs[row, :most].tolist(),
                strict=True,
            )
        )
        events.append(Token(accepted.ticket, accepted.last, float(drawn.logprob[row]), likely))
        if accepted.last in asked.end_ids:
            return self._end(accepted, "ended", events)
        return accepted.drawn < asked.max_new_tokens or self._end(accepted, "length", events)

    def _end(self, accepted: Accepted, reason: Reason, events: list[Event]) -> bool:
        events.append(Ended(accepted.ticket, reason))
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        return False
