"""Limits of connections: for clients that send no request, do not read, or are too many."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS, MIN_CONNECTIONS = 1000, 8
OTHER_FILES = 100  # descriptors open besides connections
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n"
)


def max_connections() -> int:
    """Return the number of connections for which the process may open files."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, files - OTHER_FILES))


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """maximum: connections at a time. header_seconds: until a request's headers are complete.
    unread_seconds: for which a client may leave what was sent unread."""

    maximum: int = dataclasses.field(default_factory=max_connections)
    header_seconds: float = 10
    unread_seconds: float = 20


class Connection(H11Protocol):
    """A connection within limits. If there are too many, one that waits for a request makes room
    for a new one."""

    limits: ConnectionLimits
    _headers_due: asyncio.TimerHandle | None = None
    _read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._accepted = self.loop.time()
        if len(self.connections) > self.limits.maximum and not self._make_room():
            transport.write(BUSY)
            transport.close()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._read_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()  # closing waits until everything is read

    @property
    def between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        if not self.between_requests and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        elif self.between_requests and self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limits.header_seconds, self._late)

    def _late(self) -> None:
        self._headers_due = None
        if self.between_requests:
            self.transport.abort()

    def _expect_reading(self) -> None:
        if self._read_due is None:
            due = self.limits.unread_seconds
            self._read_due = self.loop.call_later(due, self.transport.abort)

    def _make_room(self) -> bool:
        waiting = [
            other
            for other in self.connections
            if isinstance(other, Connection)
            and other is not self
            and other.between_requests
            # its last answer is sent
            and not other.transport.get_write_buffer_size()
        ]
        if waiting:
            min(waiting, key=lambda other: other._accepted).transport.abort()
        return bool(waiting)


def connection_class(limits: ConnectionLimits) -> type[Connection]:
    """Return the protocol class for uvicorn."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
