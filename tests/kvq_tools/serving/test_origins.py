"""Which pages and names may use a server: the Host and the Origin of a request, and what a browser
asks before it."""

import asyncio
import json
import socket
from typing import Any

import pytest

from kvq_tools.serving.app import create_app
from kvq_tools.serving.guard import Guard, known_hosts
from tests.kvq_tools.serving.running import NAME, PROMPT, Running


def test_a_server_that_other_machines_reach_goes_by_this_machines_name(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(socket, "gethostname", lambda: "Workstation")
    assert "workstation" in known_hosts("0.0.0.0")
    assert "workstation" not in known_hosts("127.0.0.1")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_star_lets_any_name_and_any_page_in(allowed: bool):
    answered = []

    async def app(*_: Any) -> None:
        answered.append("by the server")

    async def send(message: Any) -> None:
        answered.append(message.get("status"))

    anyone = ["*"] if allowed else ["kvq.example.com"]
    headers = [(b"host", b"evil.example.com"), (b"origin", b"https://page.example.com")]
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": headers}
    asyncio.run(Guard(app, anyone, anyone)(scope, None, send))
    assert answered[0] == ("by the server" if allowed else 403)


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("HTTPS://Friend.example.com", b"https://friend.example.com"),
        ("https://friend.example.com:443", b"https://friend.example.com"),
        ("http://localhost:80", b"http://localhost"),
        ("http://localhost:3000", b"http://localhost:3000"),
    ],
)
def test_an_origin_may_be_typed_otherwise_than_browsers_send_it(
    server: Running, typed: str, sent: bytes
):
    answered = []

    async def send(message: Any) -> None:
        answered.append(message)

    headers = [(b"host", b"localhost"), (b"origin", sent)]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1"}
    asyncio.run(create_app(server.service, origins=[typed])(scope, None, send))
    assert answered[0]["status"] == 200
    assert (b"access-control-allow-origin", sent) in answered[0]["headers"]


def test_an_error_of_the_server_is_counted_and_told_to_pages_that_may_use_it(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise KeyError("a secret of the server")

    monkeypatch.setattr(guarded.service.prompts, "of_text", broken)
    friend = {"origin": "https://friend.example.com"}
    body = json.dumps({"model": NAME, "prompt": "Hi"}).encode()
    status, headers, answer = guarded.raw("POST", "/v1/completions", body, friend)
    assert status == 500
    assert json.loads(answer)["error"]["type"] == "server_error"
    assert b"secret" not in answer
    assert headers["access-control-allow-origin"] == friend["origin"]
    counted = 'kvq_responses_total{path="/v1/completions",status="500"} 1.0'
    assert counted in guarded.raw("GET", "/metrics")[2].decode()
    monkeypatch.undo()
    assert guarded.raw("POST", "/v1/completions", body, friend)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example.com"}, 403, "host_not_allowed"),
        ({"host": "evil.example.com:8000"}, 403, "host_not_allowed"),
        ({"host": "["}, 403, "host_not_allowed"),
        ({"host": "127.0.0.1.evil.example.com"}, 403, "host_not_allowed"),
        ({"origin": "https://evil.example.com"}, 403, "origin_not_allowed"),
        ({"origin": "null"}, 403, "origin_not_allowed"),
        ({"origin": "http://localhost:1"}, 403, "origin_not_allowed"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": ""}, 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"content-encoding": "identity"}, 200, None),
        ({"host": "kvq.example.com"}, 200, None),
        ({"host": "192.168.0.7:8000"}, 200, None),
        ({"host": "[::1]:8000"}, 200, None),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200, None),
        ({"origin": "https://friend.example.com"}, 200, None),
        ({"content-type": "application/json; charset=utf-8"}, 200, None),
    ],
)
def test_pages_of_other_sites_are_refused(
    guarded: Running, headers: dict[str, str], status: int, code: str | None
):
    body = json.dumps({"model": NAME, "prompt": PROMPT, "max_tokens": 4}).encode()
    found, answered, body = guarded.raw("POST", "/v1/completions", body, headers)
    assert found == status, body
    if code is not None:
        assert json.loads(body)["error"]["code"] == code
    friend = headers.get("origin") == "https://friend.example.com"
    assert ("access-control-allow-origin" in answered) == friend


def test_browsers_ask_first_and_are_told(guarded: Running):
    asks = {"access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    for origin, status in (("https://friend.example.com", 200), ("https://evil.example.com", 400)):
        found, headers, _ = guarded.raw(
            "OPTIONS", "/v1/completions", headers=asks | {"origin": origin}
        )
        assert found == status
        assert (headers.get("access-control-allow-origin") == origin) == (status == 200)


def test_a_page_of_the_web_that_may_use_a_server_on_its_browsers_machine_can(guarded: Running):
    asks = {"origin": "https://friend.example.com", "access-control-request-method": "POST"}
    asks["access-control-request-private-network"] = "true"  # by Chrome, to machines near it
    status, headers, body = guarded.raw("OPTIONS", "/v1/completions", headers=asks)
    assert status == 200, body
    assert headers["access-control-allow-private-network"] == "true"
