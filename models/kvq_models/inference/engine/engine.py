"""The engine: requests wait in a queue, are prefilled in chunks between steps, decode in a slot,
and leave as soon as they are done.

    engine = Engine(llama, "kivi:bits=4", slots=8, capacity=4096)
    ticket = engine.submit(Request(tuple(ids), max_new_tokens=64))
    while not engine.idle:
        for event in engine.advance(): ...

One cache has a row for each slot, and one more row takes the prompt that is being read. Shapes
never change: `step_slots` and `fill_slot` are compiled once, a prefill once for each width. A
request's tokens depend on the request alone, bit for bit: its prompt is cut into the same chunks
whoever else is there, and rows do not see each other.

An engine is driven by one thread.
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
from kvq_models.inference.engine.pieces import RowPieces
from kvq_models.inference.engine.prefixes import PrefixStore, chunk_keys, scope_of
from kvq_models.inference.engine.requests import (
    Ended,
    Event,
    Likely,
    PromptRead,
    QueueFullError,
    Reason,
    Request,
    Ticket,
    Token,
)
from kvq_models.inference.method_parameters import parameters_for
from kvq_models.inference.row_sampling import Drawn, row_rules
from kvq_models.inference.sampling import Sampling
from kvq_models.llama.model import Llama

WIDTHS = (64, 128, 256)  # of prefill programs: the last is the longest chunk that others wait for
QUEUE_LIMIT = 64

_VACANT = (Sampling(), 0, 0, 0, False)


@dataclasses.dataclass
class _Held:
    """An accepted request: in the queue, in the row that is prefilled, or in a slot."""

    ticket: Ticket
    request: Request
    read: int = 0  # prompt tokens in the cache
    keys: list[bytes] = dataclasses.field(
        default_factory=list
    )  # of the prompt's chunks in the store of prefixes; [] without one
    drawn: int = 0  # tokens drawn
    last: int = 0  # the newest of them
    cancelled: bool = False
    logprobs: list[float] = dataclasses.field(default_factory=list)
    likely: list[Likely] = dataclasses.field(default_factory=list)

    @property
    def rule(self) -> tuple[Sampling, int, int, int, bool]:
        asked = self.request
        return asked.sampling, asked.seed, asked.choice, self.drawn, asked.alternatives > 0


@dataclasses.dataclass
class Counts:
    """What an engine has done so far."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_lookups: int = 0  # prompts that were looked up in the store of prefixes,
    prefix_hits: int = 0  # those of them of which it had at least the first chunk,
    prefix_tokens: int = 0  # and tokens that were not read because they were there
    ended: dict[Reason, int] = dataclasses.field(default_factory=dict)


class Engine:
    """B slots on one cache. Raises ValueError, in one line, where the cache does not fit the model
    or its parameters are missing.

    placement: the mesh on which the slots' cache lies, as the model does. Heads and tokens can be
    split, rows cannot: a prompt is read in a cache of one row. Prefixes are kept for caches on one
    device alone.

    prefixes: where the caches of prompts are kept for those that begin alike, with the bits that
    reading them again would give. The model's weights are hashed for it once. Prompts whose
    log-probabilities are asked for are always read.
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
        self._queue: deque[_Held] = deque()
        self._reading: tuple[int, _Held] | None = (
            None  # the slot that is kept for it, and whose prompt is being read
        )
        self._slots: list[_Held | None] = [None] * slots
        self._no_logits = jax.device_put(np.zeros((1, llama.config.vocab_size), np.float32))

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Slots that are taken, the one that is kept for the prompt being read included."""
        return sum(held is not None for held in self._slots) + (self._reading is not None)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.busy

    @property
    def nbytes(self) -> int:
        """Bytes of the slots' cache and of the row in which prompts are read."""
        return nbytes(self.cache) + nbytes(self._row)

    def live_tokens(self) -> int:
        """Return the tokens that the cache holds for requests."""
        held = [*self._slots, self._reading[1] if self._reading else None]
        return sum(one.read + max(0, one.drawn - 1) for one in held if one)

    def warm_up(self, *, wait: bool = True) -> None:
        """Compile every program, except those that score prompts.

        Without `wait`, return once short prompts can be served: a thread goes on with wider chunks,
        and prompts that need one of those wait for it while other requests decode. Until it is
        done, it holds a row of the cache of its own.
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
        """Whether `warm_up` is still at work in its thread."""
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
        """Accept a request. Raises ValueError where it does not fit the model or the capacity,
        QueueFullError where the queue is full."""
        request.check(self.llama.config.vocab_size, self.capacity)
        if self.waiting >= self.queue_limit:
            raise QueueFullError(self.waiting, self.queue_limit)
        ticket = next(self._tickets)
        self._queue.append(_Held(ticket, request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go, wherever it is; its last event comes with the next `advance`. Without
        effect where it has ended."""
        for held in (*self._queue, *self._slots, self._reading[1] if self._reading else None):
            if held is not None and held.ticket == ticket:
                held.cancelled = True

    def advance(self) -> list[Event]:
        """Read at most one chunk of a prompt, and then take one step of all slots. Return what
        happened."""
        events: list[Event] = []
        self._drop_cancelled(events)
        self._read_chunk(events)
        self._step(events)
        return events

    def _drop_cancelled(self, events: list[Event]) -> None:
        for held in [held for held in self._queue if held.cancelled]:
            self._queue.remove(held)
            self._end(held, "cancelled", events)
        for slot, held in enumerate(self._slots):
            if held is not None and held.cancelled:
                self._slots[slot] = None
                self._end(held, "cancelled", events)
        if self._reading and self._reading[1].cancelled:
            slot, held = self._reading
            # Its row, half read, goes into the slot, which stays vacant: what comes back is an
            # empty row.
            self._fill(slot, self._no_logits, held)
            self._reading = None
            self._end(held, "cancelled", events)

    def _read_chunk(self, events: list[Event]) -> None:
        logits = None
        if self._reading is None:
            vacant = [slot for slot, held in enumerate(self._slots) if held is None]
            if not self._queue or not vacant:
                return
            self._reading = vacant[0], self._queue.popleft()
            logits = self._recall(self._reading[1])
        slot, held = self._reading
        if held.read < len(held.request.prompt):
            compiled = self._compiling.get(self._chunk(held)[1])
            if compiled is not None and not held.request.prompt_logprobs:
                if not compiled.done() and any(self._slots):
                    return  # the others go on
                compiled.result()
            logits = self._prefill(held)
            if held.read < len(held.request.prompt):
                return
        assert logits is not None, "they come with the last chunk"
        self._reading = None
        drawn = self._fill(slot, logits, held)
        events.append(PromptRead(held.ticket, tuple(held.logprobs), tuple(held.likely)))
        if held.request.max_new_tokens == 0:
            self._end(held, "length", events)
        elif self._take(held, drawn, 0, events):
            self._slots[slot] = held

    def _chunk(self, held: _Held) -> tuple[int, int]:
        """Return how many tokens of the prompt are read next, and the width of the program that
        reads them."""
        count = min(len(held.request.prompt) - held.read, self.widths[-1])
        return count, next(width for width in self.widths if width >= count)

    def _recall(self, held: _Held) -> jax.Array | None:
        """Put what the store has of a prompt into the row that prompts are read in. Return the
        logits after it, or None."""
        if self.prefixes is None or held.request.prompt_logprobs:
            return None
        held.keys = chunk_keys(self._scope, held.request.prompt, self.widths[-1])
        found = self.prefixes.longest(held.keys)
        self.counts.prefix_lookups += 1
        if not found:
            return None
        for leaf in jax.tree.leaves(self._row):
            leaf.delete()  # there is never a third row
        self._row = self._pieces.joined(found)
        held.read = found[-1].length
        self.counts.prefix_hits += 1
        self.counts.prefix_tokens += held.read
        return jax.device_put(found[-1].logits)

    def _remember(self, held: _Held, before: int, logits: jax.Array) -> None:
        """Keep the chunk that was read after `before` tokens."""
        if self.prefixes is not None and held.keys:
            chain = held.keys[: before // self.widths[-1] + 1]
            self.prefixes.put(chain, self._pieces.cut(self._row, before, held.read, logits))

    def _prefill(self, held: _Held) -> jax.Array:
        """Read the next chunk of the prompt and return the logits [1, V] after it."""
        prompt, (count, width) = held.request.prompt, self._chunk(held)
        tokens, following = np.zeros((2, 1, width), np.int32)
        tokens[0, :count] = prompt[held.read : held.read + count]
        lengths = np.array([count], np.int32)
        if held.request.prompt_logprobs:
            after = prompt[held.read + 1 : held.read + 1 + count]
            following[0, : len(after)] = after
            logits, scores, self._row = programs.score_chunk(
                self.llama, self._row, tokens, lengths, following, self.implementation
            )
            self._keep_scores(held, len(after), *(np.asarray(score) for score in scores))
        else:
            logits, self._row = programs.prefill_chunk(
                self.llama, self._row, tokens, lengths, False, self.implementation
            )
            if (
                logits.sharding != self._no_logits.sharding
            ):  # on a mesh: or a row that is given up would be filled by another program
                self._no_logits = jax.device_put(
                    np.zeros(logits.shape, np.float32), logits.sharding
                )
        held.read += count
        self._remember(held, held.read - count, logits)
        self.counts.chunks += 1
        self.counts.prompt_tokens += count
        return logits

    def _keep_scores(
        self, held: _Held, count: int, own: np.ndarray, likely: np.ndarray, values: np.ndarray
    ) -> None:
        if not held.logprobs:
            held.logprobs.append(0.0)
            held.likely.append(())
        held.logprobs += own[:count].tolist()
        most = held.request.alternatives
        held.likely += [
            tuple(zip(likely[i, :most].tolist(), values[i, :most].tolist(), strict=True))
            for i in range(count)
        ]

    def _fill(self, slot: int, logits: jax.Array, held: _Held) -> Drawn:
        drawn, self.cache, self._row = programs.fill_slot(
            self.cache, self._row, np.int32(slot), logits, row_rules([held.rule])
        )
        return jax.tree.map(np.asarray, drawn)

    def _step(self, events: list[Event]) -> None:
        active = np.array([held is not None for held in self._slots])
        if not active.any():
            return
        tokens = np.array([held.last if held else 0 for held in self._slots], np.int32)
        rules = row_rules([held.rule if held else _VACANT for held in self._slots])
        drawn, self.cache = programs.step_slots(
            self.llama, self.cache, tokens, active, rules, self.implementation
        )
        drawn = jax.tree.map(np.asarray, drawn)
        self.counts.steps += 1
        for slot, held in enumerate(self._slots):
            if held is not None and not self._take(held, drawn, slot, events):
                self._slots[slot] = None

    def _take(self, held: _Held, drawn: Drawn, row: int, events: list[Event]) -> bool:
        """Give a request the token that was drawn in a row. Return whether it goes on."""
        if not drawn.finite[row]:
            return self._end(held, "not-finite", events)
        asked = held.request
        held.last, held.drawn = int(drawn.token[row]), held.drawn + 1
        self.counts.new_tokens += 1
        most = asked.alternatives
        likely = tuple(
            zip(
                drawn.likely[row, :most].tolist(),
                drawn.likely_logprobs[row, :most].tolist(),
                strict=True,
            )
        )
        events.append(Token(held.ticket, held.last, float(drawn.logprob[row]), likely))
        if held.last in asked.end_ids:
            return self._end(held, "ended", events)
        return held.drawn < asked.max_new_tokens or self._end(held, "length", events)

    def _end(self, held: _Held, reason: Reason, events: list[Event]) -> bool:
        events.append(Ended(held.ticket, reason))
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        return False
