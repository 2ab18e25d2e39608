"""The thread that drives an engine. Other threads submit requests and get their events, and never
wait for a step."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import (
    Ended,
    Event,
    QueueFullError,
    Reason,
    Request,
    Ticket,
    Token,
)
from kvq_tools.serving.answer import Answer, Finish

MAX_FAILURES = 3  # failures of the engine in a row after which no requests are taken

_log = logging.getLogger("kvq.serving")


class Stopping(RuntimeError):
    """The server is shutting down, or its engine failed: it takes no more requests."""


class AcceptedAnswer:
    """An accepted answer, and the time of acceptance. ticket: the engine's, once it has the
    request."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.ticket: Ticket | None = None
        self.accepted = time.monotonic()
        self.first_token: float | None = None


class Worker:
    """A thread with an engine.

    Attributes:
        compiling: True until requests can be served. They are accepted, and wait.
        failure: the reason why no requests are taken any more, or None.
        error: the error of `warm_up`, or None.
        ended: the number of answers that ended, by reason. A stop text counts as an end token.

    Args:
        on_first_token: gets the seconds from acceptance to each answer's first token.
        warm_up: True if the thread calls the engine's `warm_up` first.
    """

    def __init__(
        self,
        engine: Engine,
        on_first_token: Callable[[float], None] = lambda seconds: None,
        *,
        warm_up: bool = True,
    ):
        self.engine, self.compiling = engine, warm_up
        self.failure: str | None = None
        self.error: Exception | None = None
        self.ended: Counter[Reason] = Counter()
        self._on_first_token = on_first_token
        self._changed = threading.Condition()
        self._inbox: list[AcceptedAnswer] = []
        self._leaving: list[AcceptedAnswer] = []
        self._jobs: dict[int, AcceptedAnswer] = {}
        self._unended = 0  # accepted jobs, which slots and queue have room for
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvq-engine", daemon=True)

    def start(self, on_broken: Callable[[], None] = lambda: None) -> None:
        """Start the thread. `on_broken` is called if the programs cannot be compiled."""
        self._on_broken = on_broken
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, cancel all accepted ones, and return when they have ended, or at
        once while programs are compiled: a compiler cannot be interrupted."""
        with self._changed:
            self._stopping = True
            self._leaving += [*self._inbox, *self._jobs.values()]
            self._changed.notify()
        if not self.compiling:
            self._thread.join()

    @property
    def waiting(self) -> int:
        """Number of accepted requests that have no slot yet."""
        return len(self._inbox) + self.engine.waiting

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a request does not fit the model or the capacity. Any request that
        passes can be answered."""
        for request in requests:
            request.check(self.engine.llama.config.vocab_size, self.engine.capacity)

    def submit(self, answers: Sequence[Answer]) -> list[AcceptedAnswer]:
        """Accept all of these answers to checked requests, or none. Raises QueueFullError if the
        queue has no room for all of them, and Stopping during shutdown."""
        jobs = [AcceptedAnswer(answer) for answer in answers]
        with self._changed:
            if self._stopping or self.failure:
                raise Stopping(self.failure or "the server is shutting down")
            room = self.engine.slots + self.engine.queue_limit - self._unended
            if len(jobs) > room:
                raise QueueFullError(self.waiting, self.engine.queue_limit)
            self._unended += len(jobs)
            self._inbox += jobs
            self._changed.notify()
        return jobs

    def cancel(self, jobs: Sequence[AcceptedAnswer]) -> None:
        """Cancel jobs that nobody waits for any more."""
        with self._changed:
            self._leaving += jobs
            self._changed.notify()

    def _warm_up(self) -> None:
        try:
            self.engine.warm_up(wait=False)
        except Exception as error:
            self.error = error
            self._fail(f"its programs cannot be compiled: {type(error).__name__}", for_good=True)
            self._on_broken()
        self.compiling = False

    def _run(self) -> None:
        if self.compiling:
            self._warm_up()
        failures = 0
        while not self.failure:
            try:
                if not self._take_mail():
                    return
                if not self.engine.idle and self._advance():
                    failures = 0
            except Exception as error:
                _log.exception("the engine failed")
                failures += 1
                self._start_again(f"the engine failed: {type(error).__name__}", failures)

    def _start_again(self, reason: str, failures: int) -> None:
        """Fail the requests of the engine and empty it. Give up after several failures in a row,
        or if that fails, too."""
        try:
            self.engine.reset()
        except Exception:
            _log.exception("the engine cannot start again")
            failures = MAX_FAILURES
        self._fail(reason, for_good=failures >= MAX_FAILURES)

    def _fail(self, reason: str, *, for_good: bool) -> None:
        with self._changed:
            left = list(self._jobs.values())
            self._jobs.clear()
            if for_good:
                self.failure = reason
                left, self._inbox = [*left, *self._inbox], []
            self._unended = len(self._inbox)
        self.ended["failed"] += len(left)
        for job in left:
            job.answer.send(job.answer.fail(reason))

    def _take_mail(self) -> bool:
        """Wait until there is something to do, and submit new requests to the engine. Return False
        at the end."""
        with self._changed:
            while not (self._inbox or self._leaving or self._stopping) and self.engine.idle:
                self._changed.wait()
            if self._stopping and self.engine.idle and not self._inbox:
                return False
            for job in self._inbox:
                job.ticket = self.engine.submit(job.answer.request)
                self._jobs[job.ticket] = job
            for job in self._leaving:
                if job.ticket is not None:
                    self.engine.cancel(job.ticket)
            self._inbox, self._leaving = [], []
            return True

    def _advance(self) -> bool:
        """Advance the engine by one round. Return True if something came of it."""
        events = self.engine.advance()
        for event in events:
            job = self._jobs.get(event.ticket)
            if job is None:
                continue  # drawn after a stop text, or the end of that request
            if isinstance(event, Token) and job.first_token is None:
                job.first_token = time.monotonic() - job.accepted
                self._on_first_token(job.first_token)
            piece = job.answer.take(event)
            if job.answer.finish:
                self._end(event, job.answer.finish)
            if piece is not None:
                job.answer.send(piece)
        return bool(events)

    def _end(self, event: Event, finish: Finish) -> None:
        """Count an answer that this event ended, and make room, before the client knows of it."""
        self.engine.cancel(event.ticket)  # it knows no stop texts
        reason = event.reason if isinstance(event, Ended) and finish != "stop" else "ended"
        self.ended[reason] += 1
        with self._changed:
            del self._jobs[event.ticket]
            self._unended -= 1
