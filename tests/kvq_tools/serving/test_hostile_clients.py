"""One client, hostile or clumsy, does not stop the others: what it sends is counted before anything
is made of it, and what it does with its connection is bounded."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
import tracemalloc
from collections import Counter

import pytest

from kvq_tools.serving import fields
from kvq_tools.serving.app import create_app
from kvq_tools.serving.connections import ConnectionLimits, max_connections
from kvq_tools.serving.errors import ApiError
from tests.kvq_tools.serving.running import (
    CHAT,
    KEY,
    NAME,
    PROMPT,
    QUEUE,
    SLOTS,
    Running,
    serving,
    slow_down,
)

ASKED = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}


def connect(server: Running, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(sent)
    return connection


def closed(connection: socket.socket) -> bool:
    """Return True if the server has closed a connection, at once or within its timeout."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": [[1]] * 100_000, "n": 16},
        {"prompt": ["x"] * 100_000},
        {"prompt": [[]] * 100_000},
        {"prompt": [1] + [[1]] * 100_000},
        {"prompt": [1] * 100_000 + ["x"]},
        {"logit_bias": {str(i): "x" for i in range(100_000)}},
        {"messages": [{}] * 100_000},
        {"messages": [{"role": "user", "content": [{}] * 100_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2}] * 50},
        {"stop": [1] * 100_000},
        {"stop": ["."] * 1_000_000},
        {"prompt": [1] * 4_000_000},
        {"prompt": [[1], [1] * 4_000_000]},
        {"tools": [{}] * 100_000},
        {"stop": "q" * 1_000_000},
        {"x" * 1_000_000: 1},
        {"model": "x" * 1_000_000},
    ],
    ids=lambda field: f"{min(field)[:10]}: {str(field[min(field)])[:12]}",
)
def test_a_large_request_is_refused_before_anything_is_made_of_it(field: dict):
    chat = "messages" in field
    kind = fields.ChatFields if chat else fields.CompletionFields
    asked = {"model": NAME} | ({} if chat else {"prompt": "x"}) | field
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ApiError) as refused:  # noqa: PT012  a long name of a model is read
            asked = fields.read(kind, asked, max_choices=8, capacity=64)
            raise fields.errors.no_such_model(asked.model, NAME)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert ("model" in field) == (refused.value.status == 404)
    assert peak < 8 << 20, f"{peak >> 20} MiB for a refusal"
    assert time.process_time() - started < 2
    assert len(refused.value.message) < 500


def test_a_long_text_is_refused_by_its_length_and_nobody_waits_for_it(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    prompts = server.service.prompts
    asked: list[str] = []
    for _, tokenizer in prompts._lanes.values():
        monkeypatch.setattr(type(tokenizer), "__call__", lambda self, text, **_: asked.append(text))
    for encode in (
        prompts.of_text("x" * 1_000_000),
        prompts.of_chat([{"role": "user", "content": "x" * 1_000_000}], {}),
    ):
        with pytest.raises(ApiError, match=r"at most \d+ can fit") as refused:
            asyncio.run(encode)
        assert refused.value.code == "context_length_exceeded"
    assert asked == [], "a text that cannot fit was turned into tokens"


def test_short_prompts_do_not_wait_for_long_ones_and_waiting_is_no_fault(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    prompts, free = server.service.prompts, threading.Event()
    lane, _ = prompts._lanes[False]
    monkeypatch.setattr("kvq_tools.serving.prompts.SHORT", 3)
    monkeypatch.setattr("kvq_tools.serving.prompts.WAIT_SECONDS", 0.1)

    async def ask() -> None:
        holds = asyncio.create_task(lane.run("prompt", lambda: free.wait(20)))
        await asyncio.sleep(0)
        assert await prompts.of_text("Hi")
        with pytest.raises(ApiError) as waited:
            await prompts.of_text("A longer text")
        assert (waited.value.status, waited.value.headers["retry-after"]) == (429, "1")
        free.set()
        assert await holds
        assert await prompts.of_text("A longer text")

    asyncio.run(ask())


def test_connections_without_headers_are_closed(guarded: Running):
    half = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with connect(guarded) as silent, connect(guarded, half) as slow:
        started = time.monotonic()
        assert closed(silent)
        assert closed(slow)
        assert time.monotonic() - started < 5
    with connect(guarded, half + b"\r\n") as again:  # a second request on the same connection
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /health HTTP/1.1\r\n")
        started = time.monotonic()
        assert closed(again)
        assert time.monotonic() - started < 4


def test_what_is_no_request_writes_no_log(guarded: Running, caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    upgrade = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    try:
        for sent in (b"\x16\x03\x01\r\n\r\n", upgrade):
            with connect(guarded, sent) as connection:
                assert connection.recv(1000).startswith(b"HTTP/1.1 4")
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records


def test_many_connections_do_not_shut_others_out(guarded: Running):
    silent = [connect(guarded) for _ in range(30)]
    try:
        status, _, _ = guarded.raw("GET", "/health")
        assert status == 200
        assert len(guarded.server.server_state.connections) <= 7
    finally:
        for connection in silent:
            connection.close()


def test_an_answer_that_is_still_being_read_makes_no_room(server: Running):
    limits = ConnectionLimits(maximum=2, header_seconds=60, unread_seconds=60)
    with (
        serving(server.engine(), server.tokenizer, connections=limits) as other,
        unread(other, stream=False) as reading,
        contextlib.ExitStack() as silent,
    ):
        content = reading.recv(1)
        for _ in range(3):
            silent.enter_context(connect(other))
            assert other.raw("GET", "/health")[0] == 200
        head, _, body = (content + reading.recv(1 << 12)).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(body) < length and (more := reading.recv(1 << 16)):
            body += more
        assert len(body) == length


def test_the_limit_of_connections_leaves_files_for_others(monkeypatch: pytest.MonkeyPatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (200, 4096))
    assert max_connections() == 100
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert max_connections() == 1000


def unread(server: Running, *, stream: bool = True) -> socket.socket:
    """Return a connection whose client asks for a megabyte and does not read it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", server.port))
    fields = ASKED | {"prompt": PROMPT, "n": SLOTS + QUEUE, "logprobs": 5, "max_tokens": 230}
    fields |= {"stream": stream, "temperature": 1}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_does_not_read_is_left_and_its_slots_are_free(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
):
    slow_down(guarded.service.worker.engine, monkeypatch)
    with unread(guarded) as connection:
        assert connection.recv(1) == b"H"
        guarded.until_idle()
        assert guarded.service.worker.ended["cancelled"] > 0
        deadline = time.monotonic() + 10
        while guarded.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not guarded.server.server_state.connections


def test_a_client_that_leaves_before_its_stream_begins_frees_its_slot(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    """A stream cannot begin while the client has not read its connection's earlier answers."""
    server.until_idle()
    slow_down(server.service.worker.engine, monkeypatch)
    ended = server.service.worker.ended
    before = ended.copy()
    asked = ASKED | {"prompt": [1, 2, 3], "max_tokens": 230, "stream": True}
    arrived = [{"type": "http.request", "body": json.dumps(asked).encode()}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]

    async def receive() -> dict:
        if not arrived:
            await asyncio.sleep(0.01)
        return arrived.pop() if arrived else {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        await asyncio.Event().wait()

    asyncio.run(create_app(server.service)(scope, receive, send))
    deadline = time.monotonic() + 10
    while ended == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == before + Counter(cancelled=1)


def test_the_server_ends_while_a_client_does_not_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    limits = ConnectionLimits(unread_seconds=600)
    engine = server.engine()
    slow_down(engine, monkeypatch)
    with (
        serving(engine, server.tokenizer, connections=limits, grace_seconds=0.5) as other,
        unread(other) as connection,
    ):
        assert connection.recv(1) == b"H"
        other.server.should_exit = True
        other.thread.join(15)
        assert not other.thread.is_alive(), "the server waits for a client that does not read"
    assert other.service.worker.ended["cancelled"] > 0
    assert engine.idle


def test_clients_of_different_keys_share_no_prefixes(server: Running):
    engine = server.service.worker.engine
    with serving(engine, server.tokenizer, keys=("one", "two")) as other:
        counts, body = engine.counts, {**ASKED, "prompt": list(range(100, 190))}

        def hits(key: str) -> int:
            before = counts.prefix_hits
            headers = {"authorization": f"Bearer {key}"}
            status, *_ = other.raw("POST", "/v1/completions", json.dumps(body).encode(), headers)
            assert status == 200
            return counts.prefix_hits - before

        assert [hits(key) for key in ("one", "one", "two", "two", "one")] == [0, 1, 0, 1, 1]


def test_free_slots_take_what_the_queue_need_not_hold(server: Running):
    server.until_idle()
    status, answer = server.post("/v1/completions", ASKED | {"n": SLOTS + QUEUE})
    assert status == 200, answer
    assert len(answer["choices"]) == SLOTS + QUEUE
    status, answer = server.post("/v1/completions", ASKED | {"n": SLOTS + QUEUE + 1})
    assert (status, answer["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "\ud800"},
        {"\ud800": 1},
        {"suffix": "\ud800"},
        {"prompt": "\ud800"},
        {"messages": "\ud800"},
        {"logit_bias": {"\ud800": 1}},
        {"temperature": 10**400},
        {"seed": 10**400},
        {"logit_bias": {"5": 10**400}},
        {"tools": json.loads("[" * 900 + "]" * 900)},
    ],
    ids=lambda asked: min(asked),
)
def test_odd_values_are_the_clients_error(server: Running, asked: dict):
    for path, body in (
        ("/v1/completions", ASKED | asked),
        ("/v1/chat/completions", {"model": NAME, "messages": CHAT, "max_tokens": 1} | asked),
    ):
        status, answer = server.post(path, body)
        assert status in (400, 404), answer
        assert answer["error"]["type"] == "invalid_request_error"
