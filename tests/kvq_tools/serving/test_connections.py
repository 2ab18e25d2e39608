"""No client has all connections, or the memory and time of others, by requests that it does not
finish or sends in pieces."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator

import pytest

from kvq_tools.serving.bodies import SMALL_BODY
from kvq_tools.serving.connections import ConnectionLimits, network_of
from tests.kvq_tools.serving.running import BODY, KEY, NAME, Running, serving

ASKED = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 1}).encode()
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MAXIMUM, SHARE, PIECES = 40, 10, 50


def head(length: int | None, key: str = KEY) -> bytes:
    """Return the headers of a request. Without a length, its body comes in chunks."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"{HEAD}authorization: Bearer {key}\r\n{size}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def limited(server: Running) -> Iterator[Running]:
    limits = ConnectionLimits(MAXIMUM, header_seconds=60, pieces=PIECES)
    with serving(server.engine(), server.tokenizer, connections=limits) as other:
        yield other


def connect(server: Running, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", server.port)
    connection = socket.create_connection(address, 20, source_address=(source, 0))
    connection.sendall(sent)
    return connection


def test_unfinished_bodies_make_room_for_other_requests(server: Running):
    limits = ConnectionLimits(6, header_seconds=60)
    with (
        serving(server.engine(), server.tokenizer, connections=limits) as other,
        contextlib.ExitStack() as unfinished,
    ):
        for _ in range(20):
            unfinished.enter_context(connect(other, head(len(ASKED)) + ASKED[:1]))
        for _ in range(3):
            assert other.raw("GET", "/health")[0] == 200
        assert other.raw("POST", "/v1/completions", ASKED)[0] == 200


def test_one_address_has_a_share_of_the_connections(limited: Running):
    assert ConnectionLimits(1000).of_address == 250
    assert limited.server.config.http_protocol_class.limits.of_address == SHARE
    connections = limited.server.server_state.connections
    with contextlib.ExitStack() as opened:
        try:
            others = [opened.enter_context(connect(limited, source="127.0.0.2")) for _ in range(3)]
        except OSError:
            pytest.skip("this system has one loopback address")
        for _ in range(MAXIMUM):
            opened.enter_context(connect(limited))
        assert limited.raw("GET", "/health")[0] == 200
        assert len(connections) <= SHARE + len(others) + 1
        for connection in others:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_the_client_with_the_most_connections_makes_room(server: Running):
    limits = ConnectionLimits(12, header_seconds=60)
    with (
        serving(server.engine(), server.tokenizer, connections=limits) as other,
        contextlib.ExitStack() as opened,
    ):
        try:
            single = opened.enter_context(connect(other, source="127.0.0.9"))
        except OSError:
            pytest.skip("this system has one loopback address")
        for i in range(30):
            opened.enter_context(connect(other, source=f"127.0.0.{2 + i % 2}"))
        single.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert single.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("a socket", "a socket"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, network: str):
    assert network_of(address) == network


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("pieces", "status"), [(PIECES, 200), (PIECES + 1, 400)])
def test_a_body_comes_in_a_limited_number_of_pieces(
    limited: Running, chunked: bool, pieces: int, status: int
):
    parts = [b" "] * (pieces - 1) + [ASKED]
    length = sum(map(len, parts))
    with connect(limited, head(None if chunked else length)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                if not chunked:
                    time.sleep(0.005)  # else they arrive together
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:  # refused while packets still came
            answer = b""
        if chunked or status == 200:
            assert answer.startswith(b"HTTP/1.1 %d" % status)
        else:
            assert not answer.startswith(b"HTTP/1.1 200"), "packets have no limit"


def test_what_comes_after_a_refusal_is_not_read(limited: Running):
    """The client gets the answer, and its connection ends, whatever it still sends."""
    refused = limited.server.server_state.total_requests
    with connect(limited, head(None, "wrong") + b"1\r\n \r\n") as connection:
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 401")
        connection.sendall(b"1\r\n \r\n" * 2 * PIECES + b"0\r\n\r\n")
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connection.settimeout(3)
        while more := connection.recv(1 << 16):
            answer += more
    assert answer.count(b"HTTP/1.1") == 1
    assert limited.server.server_state.total_requests == refused + 1
    with connect(limited, head(BODY + 1)) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a_client_that_sends_on_after_a_refusal_is_disconnected(limited: Running):
    with connect(limited, head(None, "wrong") + b"1\r\n \r\n") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 10:
                connection.sendall(b"1\r\n \r\n")
                time.sleep(0.1)
        assert time.monotonic() - started < 8


def test_a_connection_lives_on_after_a_whole_request(limited: Running):
    with connect(limited) as connection:
        for key, status in (("wrong", b"401"), (KEY, b"200")):
            connection.sendall(head(len(ASKED), key) + ASKED)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)


def test_unfinished_bodies_of_all_clients_have_a_limit_together(
    limited: Running, monkeypatch: pytest.MonkeyPatch
):
    service, large = limited.service, SMALL_BODY + 15_000
    limits = dataclasses.replace(service.limits, unfinished=20_000)
    monkeypatch.setattr(service, "limits", limits)
    padded = ASKED + b" " * (large - len(ASKED))

    def status(body: bytes) -> int:
        return limited.raw("POST", "/v1/completions", body)[0]

    def until(expected: int) -> None:
        deadline = time.monotonic() + 20
        while (answered := status(padded)) != expected:
            assert time.monotonic() < deadline, answered

    assert status(padded) == 200
    with connect(limited, head(large) + padded[:-1]) as unfinished:
        until(429)
        assert status(ASKED) == 200, "a small body has room"
        unfinished.sendall(b" ")
        assert unfinished.recv(1000).startswith(b"HTTP/1.1 200")
        assert status(padded) == 200
    with connect(limited, head(large) + padded[:-1]):
        until(429)
    until(200)  # a client that leaves takes no room
