"""Run a server as a process: its socket, its signals, its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from kvq_tools.serving.connections import ConnectionLimits, connection_class
from kvq_tools.serving.sockets import let_restart
from kvq_tools.serving.worker import Worker

GRACE_SECONDS = 60  # time for answers that run when the server is told to end


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], grace_seconds: float):
        super().__init__(config)
        self._ready, self._grace_seconds = ready, grace_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace_seconds, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut(self) -> None:
        """Close all connections; uvicorn's own limit cancels tasks, with a traceback for each."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(
    app: FastAPI,
    worker: Worker,
    bound: socket.socket,
    ready: Callable[[], None] = lambda: None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Serve until SIGTERM or SIGINT. From then on connections are refused, and accepted requests
    are answered, if clients read them within `grace_seconds`. `ready` is called once clients can
    connect. A second SIGINT cuts running answers short. Raises what ended the compilation of the
    programs."""
    server = server_of(app, ready, grace_seconds=grace_seconds)
    worker.start(lambda: setattr(server, "should_exit", True))
    try:
        let_restart(bound)
        with _without_default_signals():
            server.run(sockets=[bound])
    finally:
        if not server.force_exit:
            worker.stop()
    if worker.error is not None:
        raise worker.error


def server_of(
    app: FastAPI,
    ready: Callable[[], None] = lambda: None,
    *,
    limits: ConnectionLimits | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> uvicorn.Server:
    """Return the server. `run(sockets=[...])` starts it and `should_exit = True` stops it."""
    config = uvicorn.Config(
        app,
        http=connection_class(limits or ConnectionLimits()),
        ws="none",
        log_level="error",  # clients could fill the log with warnings
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    return _Server(config, ready, grace_seconds)


@contextlib.contextmanager
def _without_default_signals() -> Iterator[None]:
    """Ignore a signal that uvicorn has handled: uvicorn raises it again at its end, which would
    kill the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
