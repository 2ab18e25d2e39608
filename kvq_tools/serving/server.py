"""Run a server as a process: its socket, its signals, its shutdown."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from kvq_tools.serving.worker import Worker


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Port 0 picks a free port. Raises OSError if
    the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]):
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def serve(
    app: FastAPI, worker: Worker, bound: socket.socket, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT. From then on connections are refused, and accepted requests
    are answered. `ready` is called once clients can connect. A second SIGINT cuts running answers
    short."""
    server = server_of(app, ready)
    worker.start()
    try:
        with _without_default_signals():
            server.run(sockets=[bound])
    finally:
        if not server.force_exit:
            worker.stop()


def server_of(app: FastAPI, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Return the server. `run(sockets=[...])` starts it and `should_exit = True` stops it."""
    return _Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", server_header=False
        ),
        ready,
    )


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
