"""Limits of connections: for clients that send no request, send it in many small pieces, do not
read, or are too many."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import sys
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS, MIN_CONNECTIONS = 1000, 8
OTHER_FILES = 100  # descriptors open besides connections
SHARE = 4  # one address has at most a quarter of all connections
MAX_PIECES = 1 << 14  # of a body, each of which costs 10 us however short it is
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
    unread_seconds: for which a client may leave what was sent unread. pieces: in which a body may
    arrive: chunks, or packets without them."""

    maximum: int = dataclasses.field(default_factory=max_connections)
    pieces: int = MAX_PIECES
    header_seconds: float = 10
    unread_seconds: float = 20

    @property
    def of_address(self) -> int:
        """The connections that one client's address may have at a time."""
        return min(self.maximum, max(MIN_CONNECTIONS, self.maximum // SHARE))


class _Requests(h11.Connection):
    """h11's parser, which refuses a body in more than `limit` pieces."""

    def __init__(self, limit: int):
        super().__init__(h11.SERVER)
        self._pieces, self._limit = 0, limit

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            if self._pieces > self._limit:
                raise h11.RemoteProtocolError(f"a body in more than {self._limit} pieces")
        return event


class Connection(H11Protocol):
    """A connection within limits. If there are too many, of all clients or of one address, one that
    waits for a request or its body makes room for a new one."""

    limits: ConnectionLimits
    address = ""
    _refused = False  # the answer is sent, and what still comes of its request is dropped
    _headers_due: asyncio.TimerHandle | None = None
    _read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._accepted = self.loop.time()
        self.address = network_of(self.client[0]) if self.client else ""
        self.conn = _Requests(self.limits.pieces)
        if not self._make_room():
            transport.write(BUSY)
            transport.close()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._read_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._expect_headers()

    def on_response_complete(self) -> None:
        """End a connection whose request was answered before all of it came, such as one without a
        key. Closing it at once would reset it, and the client might not get the answer."""
        self._refused = self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing()
        super().on_response_complete()  # which closes it after its keep-alive time
        if self._refused:
            self.transport.write_eof()

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

    @property
    def replaceable(self) -> bool:
        """True if it waits for a request or its body, and its last answer is sent."""
        waits = self.between_requests or self.cycle.more_body
        return waits and not self.transport.get_write_buffer_size()

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
        """Return True if there is room for this connection. The oldest one that is replaceable
        makes it, of this client's address if that has its share, else of the one with the most."""
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection)
            and other is not self
            and not other.transport.is_closing()
        ]
        counts = Counter(other.address for other in others)
        crowded = counts[self.address] >= self.limits.of_address
        if not crowded and len(others) < self.limits.maximum:
            return True
        replaceable = [
            other
            for other in others
            if other.replaceable and (not crowded or other.address == self.address)
        ]
        if replaceable:
            first = min(replaceable, key=lambda other: (-counts[other.address], other._accepted))
            first.transport.abort()
        return bool(replaceable)


def network_of(address: str) -> str:
    """Return what counts as one client: an address of IPv4, or the /64 of one of IPv6, all of
    which one client usually has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def connection_class(limits: ConnectionLimits) -> type[Connection]:
    """Return the protocol class for uvicorn."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
