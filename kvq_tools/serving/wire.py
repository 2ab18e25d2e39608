"""Answers as OpenAI's API has them: whole ones, and chunks of a stream.

They are plain dicts: a long answer with alternatives has a million of entries, for which objects of
OpenAI's types would take minutes and gigabytes.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvq_tools.serving.answer import AnswerPiece, TokenInText
from kvq_tools.serving.text import TokenTexts


@dataclasses.dataclass
class Usage:
    """Token counts of a response: each prompt once, the drawn tokens of every choice, and the
    prompt tokens that came from the store of prefixes for the first choice of each prompt."""

    prompt: int
    drawn: int = 0
    stored: int = 0

    def counted(self) -> dict[str, Any]:
        return {
            "completion_tokens": self.drawn,
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.drawn,
            "prompt_tokens_details": {"cached_tokens": self.stored},
        }


class _Wire:
    """One response, whole or in chunks. `prefix` begins its id."""

    def __init__(self, prefix: str, model: str, texts: TokenTexts):
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.model, self._texts = model, texts

    def _response(
        self, name: str, choices: Sequence[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        counted = {} if usage is None else {"usage": usage.counted()}
        return {**head, "choices": list(choices), **counted}


class CompletionWire(_Wire):
    """Responses of /v1/completions. alternatives: None without log-probabilities."""

    def __init__(self, model: str, texts: TokenTexts, alternatives: int | None):
        super().__init__("cmpl", model, texts)
        self._alternatives = alternatives

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        return _listed(self._completion([self._choice(piece.index, [piece])]))

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._completion([], usage)

    def whole(self, choices: list[list[AnswerPiece]], usage: Usage) -> bytes:
        """Return the response in JSON. Other threads run in between."""
        made = [self._choice(i, pieces) for i, pieces in enumerate(choices)]
        return "".join(_json(self._completion(made, usage))).encode()

    def _choice(self, index: int, pieces: list[AnswerPiece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        # a chunk may have no tokens, or no finish reason yet
        shown = self._alternatives is not None and tokens
        return {
            "finish_reason": pieces[-1].finish,
            "index": index,
            "logprobs": self._logprobs(tokens) if shown else None,
            "text": "".join(piece.text for piece in pieces),
        }

    def _logprobs(self, tokens: list[TokenInText]) -> dict[str, Any]:
        def likely(token: TokenInText) -> dict[str, float] | None:
            if token.logprob is None:
                return None
            # two tokens may have the same text; the more probable one is reported
            return {self._texts.text(other): logprob for other, logprob in reversed(token.likely)}

        return {
            "text_offset": (token.offset for token in tokens),
            "token_logprobs": (token.logprob for token in tokens),
            "tokens": (self._texts.text(token.token) for token in tokens),
            "top_logprobs": map(likely, tokens) if self._alternatives else None,
        }

    def _completion(
        self, choices: list[dict[str, Any]], usage: Usage | None = None
    ) -> dict[str, Any]:
        return self._response("text_completion", choices, usage)


class ChatWire(_Wire):
    """Responses of /v1/chat/completions."""

    def __init__(self, model: str, texts: TokenTexts, logprobs: bool):
        super().__init__("chatcmpl", model, texts)
        self._logprobs = logprobs

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"content": "", "role": "assistant"}
        return [self._chunk([{"delta": delta, "finish_reason": None, "index": index}])]

    def chunk(self, piece: AnswerPiece) -> dict[str, Any]:
        shown = self._logprobs and piece.tokens
        choice = {
            "delta": {"content": piece.text} if piece.text or piece.tokens else {},
            "finish_reason": piece.finish,
            "index": piece.index,
            "logprobs": {"content": self._content(piece.tokens)} if shown else None,
        }
        return _listed(self._chunk([choice]))

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([], usage)

    def whole(self, choices: list[list[AnswerPiece]], usage: Usage) -> bytes:
        """Return the response in JSON. Other threads run in between."""
        finished = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            logprobs = {"content": self._content(tokens), "refusal": None}
            choice = {
                "finish_reason": pieces[-1].finish,
                "index": index,
                "logprobs": logprobs if self._logprobs else None,
                "message": {"content": text, "refusal": None, "role": "assistant"},
            }
            finished.append(choice)
        return "".join(_json(self._response("chat.completion", finished, usage))).encode()

    def _content(self, tokens: Sequence[TokenInText]) -> Iterator[dict[str, Any]]:
        for token in tokens:
            alternatives = [self._named(*other) for other in token.likely]
            named = self._named(token.token, token.logprob or 0.0)
            yield named | {"top_logprobs": alternatives}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts.text(token)
        return {"token": text, "bytes": self._texts.bytes(token), "logprob": logprob}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        return self._response("chat.completion.chunk", choices, usage)


def _listed(value: Any) -> Any:
    """Return a response whose iterators are lists."""
    if isinstance(value, dict):
        return {name: _listed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_listed(one) for one in value]
    return list(value) if isinstance(value, Iterator) else value


def _json(value: Any) -> Iterator[str]:
    """Yield JSON in parts, one for each entry of an iterator: json.dumps lets no other thread
    run."""
    if isinstance(value, dict):
        before = "{"
        for name, one in value.items():
            yield f"{before}{_dumped(name)}:"
            yield from _json(one)
            before = ","
        yield "}"
    elif isinstance(value, list | Iterator):
        entries = (
            map(_dumped, value) if isinstance(value, Iterator) else map("".join, map(_json, value))
        )
        before = "["
        for entry in entries:
            yield before + entry
            before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield _dumped(value)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
