"""Bodies of requests: read within limits, and parsed as strict JSON."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import Request

from kvq_jax.files.json_text import parse_json
from kvq_tools.serving import errors
from kvq_tools.serving.errors import ApiError

MAX_BODY = 8 << 20
SMALL_BODY = 1 << 16  # bytes, which no other client's bodies take the room of
MAX_UNFINISHED = 64 << 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of bodies. body: bytes of one. body_seconds: for its arrival. unfinished: bytes of all
    that have not arrived, without the first SMALL_BODY of each."""

    body: int = MAX_BODY
    body_seconds: float = 60
    unfinished: int = MAX_UNFINISHED


class BodyReader:
    """Read the bodies of one server.

    Attributes:
        unfinished: bytes of those that are being read, without the first SMALL_BODY of each.
    """

    def __init__(self) -> None:
        self.unfinished = 0

    async def json(self, request: Request, limits: Limits) -> Any:
        """Return the body as JSON. Raise ApiError if it is too large, too slow, not JSON in UTF-8,
        or if the unfinished bodies of all clients are too large."""
        try:
            body = await asyncio.wait_for(self._read(request, limits), limits.body_seconds)
            return parse_strict(body.decode("utf-8"))
        except TimeoutError:
            raise ApiError(
                408, f"The request body did not arrive within {limits.body_seconds:g} s."
            ) from None
        except ValueError as error:
            message = f"We could not parse the JSON body of your request: {error}"
            raise ApiError(400, message, code="invalid_json") from None

    async def _read(self, request: Request, limits: Limits) -> bytes:
        body, counted = bytearray(), 0
        # h11 and httptools refuse other values
        if int(request.headers.get("content-length", "0")) > limits.body:
            raise errors.too_large(limits.body)
        try:
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise errors.too_large(limits.body)
                new = max(0, len(body) - SMALL_BODY) - counted
                if self.unfinished + new > limits.unfinished:
                    raise errors.busy("large requests of other clients are still arriving")
                self.unfinished += new
                counted += new
        finally:
            self.unfinished -= counted
        return bytes(body)


def parse_strict(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError, in one line, for NaN and infinities, which
    are no JSON, for a name that an object has twice, of which others may read another one, and for
    a text that is nested too deeply."""
    return parse_json(text, object_pairs_hook=_object, parse_constant=_refuse)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = set[str]()
        again = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"an object has the name {errors.shortened(again)!r} twice")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
