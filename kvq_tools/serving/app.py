"""The routes of the server: OpenAI's API, health, metrics, and a page to chat and to watch the
metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from kvq_tools.serving import errors, fields, guard
from kvq_tools.serving.answer import AnswerPiece
from kvq_tools.serving.bodies import BodyReader
from kvq_tools.serving.errors import ApiError, ErrorResponse
from kvq_tools.serving.service import Pending, Service
from kvq_tools.serving.wire import ChatWire, CompletionWire

MANY_TOKENS = 100  # whose log-probabilities take some ms
READ = ["GET", "HEAD"]
ANSWERED = [*READ, "POST"]
CLIENT_GONE = 499  # nginx's code: the client has gone
PAGE_POLICY = (  # the page may only connect to this server
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(
    service: Service,
    api_keys: Collection[str] = (),
    *,
    hosts: Collection[str] = (guard.ANY,),
    origins: Collection[str] = (),
) -> FastAPI:
    """Return the application.

    Args:
        api_keys: every path requires one of them, except /health and the page, which holds no data.
            Prompts of several keys share no prefixes.
        hosts: names by which clients may call the server; see `guard.known_hosts`.
        origins: other web sites whose pages may use the server.
    """
    origins = [guard.web_origin(origin) for origin in origins]
    # Clients know OpenAI's own description. A redirect from behind a proxy would name http.
    app = FastAPI(title="kvq", openapi_url=None, redirect_slashes=False)
    guarded = APIRouter(dependencies=[Depends(_authorization(api_keys))])
    _add_models(guarded, service)
    _add_answers(guarded, service)
    app.include_router(guarded)
    _add_pages(app, service)
    _handle_errors(app)
    app.add_middleware(_FailureHandler)
    app.add_middleware(guard.Guard, hosts=hosts, origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=ANSWERED,
            allow_headers=["*"],
            allow_private_network=True,  # the server mostly is on the browser's machine
        )
    app.add_middleware(_ResponseCounter, service=service)
    return app


def _authorization(api_keys: Collection[str]) -> Callable[[Request], None]:
    """Return the check of a request's key, which also names the owner of its prompts."""
    keys = [key.encode() for key in api_keys]

    def authorized(request: Request) -> None:
        request.state.owner = ""
        if not keys:
            return
        scheme, _, client_key = request.headers.get("authorization", "").partition(" ")
        client_key = client_key.strip(" ")
        if scheme.lower() != "bearer" or not client_key:
            raise errors.no_key()
        sent = client_key.encode("latin-1")  # as Starlette decodes the bytes of headers
        matching = [key for key in keys if hmac.compare_digest(sent, key)]
        if not matching:
            raise errors.wrong_key()
        if len(keys) > 1:
            request.state.owner = hashlib.sha256(b"kvq owner" + matching[0]).hexdigest()

    return authorized


def _add_models(routes: APIRouter, service: Service) -> None:
    """Add the list of models, and the metrics of the one that is served."""
    created = int(time.time())

    def model() -> dict[str, Any]:
        return Model(id=service.name, object="model", created=created, owned_by="kvq").model_dump(
            exclude_unset=True
        )

    @routes.api_route("/v1/models", methods=READ)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model()]})

    @routes.api_route("/v1/models/{name:path}", methods=READ)
    async def one_model(name: str) -> JSONResponse:
        if not name:
            raise HTTPException(404)
        if name != service.name:
            raise errors.no_such_model(name, service.name)
        return JSONResponse(model())

    @routes.api_route("/metrics", methods=READ)
    def metrics() -> Response:  # in a thread: it lists the prefixes on disk
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_answers(routes: APIRouter, service: Service) -> None:
    """Add what generates."""
    bodies = BodyReader()

    async def read(request: Request, kind: Any) -> Any:
        asked = fields.read(
            kind,
            await bodies.json(request, service.limits),
            max_choices=service.max_choices,
            capacity=service.capacity,
        )
        if asked.model != service.name:
            raise errors.no_such_model(asked.model, service.name)
        return asked

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = await read(request, fields.CompletionFields)
        pending = await service.completion(asked, request.state.owner)
        return await _respond(
            request, asked, pending, CompletionWire(service.name, service.texts, asked.logprobs)
        )

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = await read(request, fields.ChatFields)
        pending = await service.chat(asked, request.state.owner)
        return await _respond(
            request, asked, pending, ChatWire(service.name, service.texts, bool(asked.logprobs))
        )


def _add_pages(app: FastAPI, service: Service) -> None:
    """Add what needs no key: the health, and the page, which holds no data."""

    @app.api_route("/health", methods=READ)
    async def health() -> JSONResponse:
        worker = service.worker
        state = {
            "status": worker.failure or ("compiling" if worker.compiling else "ok"),
            "slots": worker.engine.slots,
            "busy": 0 if worker.compiling else worker.engine.busy,
            "waiting": worker.waiting,
        }
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    page = (importlib.resources.files("kvq_tools.serving") / "page.html").read_bytes()

    @app.api_route("/", methods=READ)
    async def index() -> Response:
        return Response(
            page,
            media_type="text/html",
            headers={"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"},
        )


class _ResponseCounter:
    """Count responses by path and status."""

    def __init__(self, app: Any, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                # there may be any number of unknown paths
                route = getattr(scope.get("route"), "path", "other")
                self._service.metrics.responses.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


class _FailureHandler:
    """Answer a request on which the code of a route fails, where the response is still counted and
    pages of other origins may read it: Starlette's own handler is outside of every middleware. The
    exception goes on to the log."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def watched(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if scope["type"] == "http" and not begun:
                await ErrorResponse(errors.bug())(scope, receive, send)
            raise


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return ErrorResponse(error)

    @app.exception_handler(HTTPException)
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return ErrorResponse(errors.no_such_path(request.method, request.url.path))
        message = str(error.detail)
        details: dict[str, Any] = {}
        if error.status_code == 405:
            # in OpenAI's words
            message = f"Not allowed to {request.method} on {errors.shortened(request.url.path)}."
            details = {"code": "method_not_supported", "headers": error.headers}  # Allow
        return ErrorResponse(ApiError(error.status_code, message, **details))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)


async def _respond(
    request: Request, asked: Any, pending: Pending, wire: CompletionWire | ChatWire
) -> Response:
    if asked.stream:
        return _Stream(pending, _events(request, asked, pending, wire))
    choices: list[list[Any]] = [[] for _ in range(pending.choices)]
    async with contextlib.aclosing(pending.pieces(request)) as pieces:
        async for piece in pieces:
            choices[piece.index].append(piece)
    if not all(pieces and pieces[-1].finish for pieces in choices):
        return Response(status_code=CLIENT_GONE)
    whole = await asyncio.to_thread(wire.whole, choices, pending.usage)
    return Response(whole, media_type="application/json")


class _Stream(StreamingResponse):
    """A stream of events. Its slots are free when it ends, even if no event was asked for: the
    client may leave before the response begins."""

    def __init__(self, pending: Pending, events: AsyncIterator[str]):
        # nginx is told to pass on each event at once
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._pending = pending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pending.leave()


async def _events(
    request: Request, asked: Any, pending: Pending, wire: CompletionWire | ChatWire
) -> AsyncIterator[str]:
    """Yield server-sent events: a chunk for each piece, then the usage if requested, then
    [DONE]."""
    beside = {"usage": None} if asked.usage_in_stream else {}
    try:
        for index in range(pending.choices):
            for opening in wire.opening(index):
                yield _event(opening | beside)
        async with contextlib.aclosing(pending.pieces(request)) as pieces:
            async for piece in pieces:
                if piece.text or piece.tokens or piece.finish:
                    yield await _chunk(wire, piece, beside)
        if asked.usage_in_stream:
            yield _event(wire.usage_chunk(pending.usage))
    except ApiError as error:
        yield f"data: {bytes(ErrorResponse(error).body).decode()}\n\n"
        return
    yield "data: [DONE]\n\n"


async def _chunk(
    wire: CompletionWire | ChatWire, piece: AnswerPiece, beside: dict[str, Any]
) -> str:
    """Return the event of a piece. One that echoes a prompt has all of its tokens."""

    def made() -> str:
        return _event(wire.chunk(piece) | beside)

    return made() if len(piece.tokens) < MANY_TOKENS else await asyncio.to_thread(made)


def _event(content: dict[str, Any]) -> str:
    """Return an event in ASCII. Many clients split a stream as Unicode text, in which an answer's
    U+0085 and U+2028 end a line, or decode each packet by itself, which may end in a character."""
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"
