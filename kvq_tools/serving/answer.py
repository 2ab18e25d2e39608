"""One choice of an answer as it grows: engine events go in, pieces of text with their tokens come
out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias

from kvq_models.inference.engine.requests import Ended, Event, Likely, PromptRead, Request, Token
from kvq_tools.growing_text import GrowingText
from kvq_tools.serving.text import Stops

Finish: TypeAlias = Literal["stop", "length", "failed", "cancelled"]

_FINISH: dict[str, Finish] = {"ended": "stop", "length": "length", "cancelled": "cancelled"}


@dataclasses.dataclass(frozen=True)
class TokenInText:
    """A token, its log-probability (None if nothing came before it), the most probable tokens, and
    the offset of its text."""

    token: int
    logprob: float | None
    likely: Likely
    offset: int


@dataclasses.dataclass(frozen=True)
class AnswerPiece:
    """New text of choice `index` with the tokens that begin in it. The last piece has the reason
    for the end, the number of drawn tokens, and that of prompt tokens that came from the store of
    prefixes."""

    index: int
    text: str
    tokens: tuple[TokenInText, ...] = ()
    finish: Finish | None = None
    drawn: int = 0
    stored: int = 0
    failure: str = ""


class Answer:
    """The text of one choice. `send` takes each of its pieces to the client.

    prompt: the text of the first piece in parts, one for each token if log-probabilities are sent
    with it. None: the prompt is not sent. stops: texts that end the answer. shown_ends: tokens that
    end it and are reported in its last piece, although they have no text.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Any,
        stops: Sequence[str],
        prompt: tuple[str, ...] | None,
        send: Callable[[AnswerPiece], None],
        shown_ends: Collection[int] = (),
    ):
        self.index, self.request, self.send = index, request, send
        self.finish: Finish | None = None  # how it ended
        self._prompt = prompt
        self._text = GrowingText(tokenizer, request.prompt)
        self._stops, self._shown_ends = Stops(tuple(stops)), shown_ends
        self._waiting: list[TokenInText] = []  # tokens whose text is not final yet, in order
        self._decoded = self._sent = 0  # characters
        self._drawn = self._stored = 0
        self._end: tuple[Token, ...] = ()

    def take(self, event: Event) -> AnswerPiece | None:
        """Return the piece that an event completes, if it does. Take no event after the end."""
        match event:
            case PromptRead():
                self._stored = event.stored
                return None if self._prompt is None else self._echo(self._prompt, event)
            case Token():
                return self._token(event)
            case Ended(reason="not-finite"):
                return self.fail("the model computed numbers that are not finite (nan or inf)")
            case Ended(reason="failed"):
                return self.fail("the program for this prompt cannot be compiled")
            case Ended(reason="damaged"):
                return self.fail("the memory of the answer was damaged")
            case Ended(reason=reason):
                return self._finish(_FINISH[reason])

    def fail(self, message: str) -> AnswerPiece:
        """End the answer with an error, which its last piece tells."""
        self.finish = "failed"
        return AnswerPiece(self.index, "", finish="failed", drawn=self._drawn, failure=message)

    def _echo(self, parts: tuple[str, ...], event: PromptRead) -> AnswerPiece:
        *offsets, self._decoded = itertools.accumulate(map(len, parts), initial=0)
        self._sent = self._decoded
        tokens = ()
        if event.logprobs:
            terms = zip(self.request.prompt, event.logprobs, event.likely, offsets, strict=True)
            tokens = tuple(
                TokenInText(token, logprob if i else None, likely, offset)
                for i, (token, logprob, likely, offset) in enumerate(terms)
            )
        return AnswerPiece(self.index, "".join(parts), tokens)

    def _token(self, event: Token) -> AnswerPiece | None:
        self._drawn += 1
        if event.token in self.request.end_ids:
            self._end = (event,) if event.token in self._shown_ends else ()
            return None  # it only marks the end of the text
        self._waiting.append(TokenInText(event.token, event.logprob, event.likely, self._decoded))
        new = self._text.add(event.token)
        self._decoded += len(new)
        certain, stopped = self._stops.add(new)
        if stopped:
            return self._piece(certain, "stop")
        return self._piece(certain) if certain else None

    def _finish(self, finish: Finish) -> AnswerPiece:
        rest = self._text.rest()
        self._decoded += len(rest)
        self._waiting += [
            TokenInText(end.token, end.logprob, end.likely, self._decoded) for end in self._end
        ]
        certain, stopped = self._stops.add(rest)
        if stopped:
            return self._piece(certain, "stop")
        return self._piece(certain + self._stops.rest(), finish, whole=True)

    def _piece(
        self, text: str, finish: Finish | None = None, *, whole: bool = False
    ) -> AnswerPiece:
        """Return the next text. whole: it is the last one, and no stop text cut it."""
        self._sent += len(text)
        self.finish = finish
        # Tokens without text, such as the first half of a character, come with the text after them,
        # or with the end.
        end = self._sent + whole
        ready = tuple(itertools.takewhile(lambda token: token.offset < end, self._waiting))
        del self._waiting[: len(ready)]
        return AnswerPiece(self.index, text, ready, finish, self._drawn, self._stored)
