"""Errors as OpenAI words them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from kvq_models.inference.engine.requests import CapacityError, QueueFullError, VocabularyError
from kvq_tools.serving.worker import Stopping

RETRY_AFTER = 1  # seconds
MAX_SHOWN_LENGTH = 100  # characters of a client's text


class ApiError(Exception):
    """An error response for a client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self._headers = headers or {}
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        retry = {"retry-after": str(RETRY_AFTER)} if self.status in (429, 503) else {}
        return {**self._headers, **retry}


class ErrorResponse(JSONResponse):
    """The response of an error. It is ASCII, because a client's text may be no Unicode text."""

    def __init__(self, error: ApiError):
        super().__init__(error.body, error.status, error.headers)

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def unrecognized(name: str) -> ApiError:
    name = shortened(name)
    return ApiError(
        400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
    )


def unsupported(name: str, value: object) -> ApiError:
    return ApiError(
        400,
        f"Unsupported value: '{name}' does not support {reprlib.repr(value)} with this server:"
        " leave it out.",
        param=name,
        code="unsupported_value",
    )


def no_tools(name: str) -> ApiError:
    return ApiError(
        400,
        f"This server does not support tools (function calling): leave out '{name}'.",
        param=name,
        code="unsupported_value",
    )


def shortened(text: str) -> str:
    """Return a client's text for a message, which no client can make long."""
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def invalid(name: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"Invalid value for '{name}': {message}", param=name, code=code)


def no_such_path(method: str, path: str) -> ApiError:
    message = (
        f"Invalid URL ({method} {shortened(path)}): this server has /v1/models, /v1/completions and"
        " /v1/chat/completions."
    )
    return ApiError(404, message, code="unknown_url")


def no_such_model(name: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model '{shortened(name)}' does not exist: this server has '{served}'.",
        param="model",
        code="model_not_found",
    )


def wrong_key() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")


def no_key() -> ApiError:
    message = (
        "You didn't provide an API key. Provide it in an Authorization header using Bearer auth"
        " (i.e. Authorization: Bearer YOUR_KEY)."
    )
    return ApiError(401, message)


def foreign_host(host: str) -> ApiError:
    message = (
        f"The host {shortened(host)!r} is not this server's. If it is one of its names, start the"
        " server with --allow-host."
    )
    return ApiError(403, message, code="host_not_allowed")


def foreign_origin(origin: str) -> ApiError:
    message = (
        f"Pages of {shortened(origin)!r} may not use this server. To let them, start it with --cors"
        " ORIGIN."
    )
    return ApiError(403, message, code="origin_not_allowed")


def not_json(kind: str) -> ApiError:
    message = (
        f"The body has the content type {shortened(kind)!r}; send JSON, with the header"
        " content-type: application/json."
    )
    return ApiError(415, message, code="unsupported_media_type")


def encoded(coding: str) -> ApiError:
    message = (
        f"The body has the content encoding {shortened(coding)!r}; send it as it is, without"
        " content-encoding."
    )
    return ApiError(415, message, code="unsupported_media_type")


def bug() -> ApiError:
    return ApiError(
        500, "The server had an error while processing your request.", kind="server_error"
    )


def busy(what: str) -> ApiError:
    message = f"The server is busy: {what}. Please try again later."
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")


def too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {limit} bytes.", code="request_too_large"
    )


def of_refusal(error: ValueError | QueueFullError | Stopping) -> ApiError:
    """Return the error for a request that the engine does not accept."""
    if isinstance(error, CapacityError):
        message = (
            f"This model's maximum context length is {error.capacity} tokens. However, you"
            f" requested {error.prompt + error.new} tokens ({error.prompt} in the prompt,"
            f" {error.new} in the completion). Please reduce the length of either one."
        )
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, VocabularyError):
        return invalid("logit_bias" if error.biased else "prompt", shortened(str(error)))
    if isinstance(error, QueueFullError):
        # with choices, this may be before the queue is full
        return busy(f"its slots and its queue of {error.limit} have no room for this request")
    if isinstance(error, Stopping):
        return ApiError(
            503,
            f"The server takes no requests: {error}.",
            kind="server_error",
            code="service_unavailable",
        )
    return ApiError(400, str(error))
