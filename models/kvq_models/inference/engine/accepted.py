"""The state of an engine's requests: each accepted request, and the counters over all of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvq_models.inference.engine.requests import Likely, PromptRead, Reason, Request, Ticket, Token
from kvq_models.inference.row_sampling import Drawn, RowRule

# the rule of a slot without a request
VACANT = RowRule()


@dataclasses.dataclass
class Accepted:
    """An accepted request: in the queue, in the prompt row, or in a slot."""

    ticket: Ticket
    request: Request
    read: int = 0  # prompt tokens in the cache
    stored: int = 0  # of these, tokens that came from the store of prefixes
    # keys of the prompt's chunks in the store of prefixes; [] without a store
    keys: list[bytes] = dataclasses.field(default_factory=list)
    drawn: int = 0  # tokens drawn
    last: int = 0  # the newest token
    penalty: float = 0.0  # what to subtract from the logit of the newest token from now on
    cancelled: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)  # all drawn tokens
    drawn_logprobs: list[float] = dataclasses.field(default_factory=list)  # one for each
    attempts: int = 1
    damaged_in: int | None = None  # the slot of the last attempt, whose memory was damaged
    # tokens that were sent before it began again, with their log-probabilities
    replayed: tuple[tuple[int, float], ...] = ()
    logprobs: list[float] = dataclasses.field(default_factory=list)
    likely: list[Likely] = dataclasses.field(default_factory=list)

    @property
    def rule(self) -> RowRule:
        """The rule of the next token."""
        asked = self.request
        return RowRule(asked.sampling, asked.seed, asked.choice, self.drawn, asked.alternatives > 0)

    def add_token(self, token: int, logprob: float) -> None:
        """Note a token that was drawn."""
        self.last, self.drawn, asked = token, self.drawn + 1, self.request
        if asked.frequency_penalty or asked.presence_penalty:
            self.penalty = asked.frequency_penalty
            self.penalty += 0 if token in self.tokens else asked.presence_penalty
        self.tokens.append(token)
        self.drawn_logprobs.append(logprob)

    def take(self, drawn: Drawn, row: int) -> tuple[list[Token], Reason | None]:
        """Add the token that was drawn in a row. Return (its event, unless it was sent before; the
        reason if the request ends with it)."""
        if not drawn.finite[row]:
            return [], "not-finite"
        self.add_token(int(drawn.token[row]), float(drawn.logprob[row]))
        sent = self.drawn <= len(self.replayed)
        if sent and self.sent_wrong:
            return [], "damaged"  # what was sent came from damage
        events = [] if sent else [self.token_event(drawn, row)]
        if self.last in self.request.end_ids:
            return events, "ended"
        return events, "length" if self.drawn >= self.request.max_new_tokens else None

    def prompt_event(self) -> PromptRead:
        """Return the event of the prompt, with the scores that were asked for."""
        return PromptRead(self.ticket, tuple(self.logprobs), tuple(self.likely), self.stored)

    def token_event(self, drawn: Drawn, row: int) -> Token:
        """Return the event of the newest token, which was drawn in this row."""
        maximum = self.request.alternatives
        tokens, logprobs = drawn.likely[row, :maximum], drawn.likely_logprobs[row, :maximum]
        likely = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        return Token(self.ticket, self.last, float(drawn.logprob[row]), likely)

    @property
    def sent_wrong(self) -> bool:
        """True if the newest token is not the one that was sent in its place."""
        token, logprob = self.replayed[self.drawn - 1]
        differs = self.request.logprobs and logprob != self.drawn_logprobs[-1]
        return token != self.last or differs

    @property
    def run(self) -> tuple[Ticket, int]:
        """The name of this attempt to answer."""
        return self.ticket, self.attempts

    @property
    def tokens_held(self) -> int:
        """The number of tokens in the cache: the newest one is not there yet."""
        return self.read + max(0, self.drawn - 1)

    def begin_again(self, damaged_in: int) -> None:
        """Forget everything that depends on the cache, which was damaged in this slot. The tokens
        come again, the same ones."""
        if len(self.tokens) > len(self.replayed):
            self.replayed = tuple(zip(self.tokens, self.drawn_logprobs, strict=True))
        self.attempts, self.damaged_in, self.penalty = self.attempts + 1, damaged_in, 0.0
        self.read = self.stored = self.drawn = self.last = 0
        for of_cache in (self.tokens, self.drawn_logprobs, self.logprobs, self.likely):
            of_cache.clear()

    def add_scores(
        self, count: int, logprobs: np.ndarray, likely: np.ndarray, values: np.ndarray
    ) -> None:
        """Add the log-probabilities of `count` prompt tokens, with the most probable tokens there.
        The prompt's first token has none."""
        if not self.logprobs:
            self.logprobs.append(0.0)
            self.likely.append(())
        self.logprobs += logprobs[:count].tolist()
        maximum = self.request.alternatives
        self.likely += [
            tuple(zip(likely[i, :maximum].tolist(), values[i, :maximum].tolist(), strict=True))
            for i in range(count)
        ]


@dataclasses.dataclass
class Counts:
    """Counters of an engine's work so far."""

    steps: int = 0
    chunks: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_lookups: int = 0  # prompts looked up in the store of prefixes
    prefix_hits: int = 0  # of these, prompts with at least the first chunk in it
    prefix_tokens: int = 0  # tokens that came from the store instead of being read
    damaged: int = 0  # how often memory of a request, or of an empty row, was damaged

    def add_lookup(self, stored: int) -> None:
        """Count a prompt that was looked up in the store of prefixes, which has `stored` tokens of
        it."""
        self.prefix_lookups += 1
        self.prefix_hits += stored > 0
        self.prefix_tokens += stored
