"""The server's refusals and their messages: fields, bodies, unauthorized clients, a full queue, and
clients that leave."""

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections import Counter
from typing import Any

import openai
import pytest

from kvq_tools.serving.fields import NEUTRAL
from kvq_tools.serving.worker import MAX_FAILURES
from tests.kvq_tools.serving.engine_answers import first_choice
from tests.kvq_tools.serving.running import (
    BODY,
    CAPACITY,
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

ASKING = {  # a value of each refused field that asks for something
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {},
    "parallel_tool_calls": 3,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "suffix": "x",
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "x"}
CALL = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_that_is_not_served_is_refused_if_it_asks_for_something(server: Running, name: str):
    for path, needed in (("", {"prompt": "x"}), ("chat/", {"messages": CHAT})):
        asked = {"model": NAME, "max_tokens": 1, **needed, name: ASKING[name]}
        status, body = server.post(f"/v1/{path}completions", asked)
        assert status == 400, body
        refusal = {"param": name, "type": "invalid_request_error"}
        assert body["error"].items() >= refusal.items(), body


def test_values_that_ask_for_nothing_are_accepted(server: Running):
    nothing = {name: (None, *values)[-1] for name, values in NEUTRAL.items()}
    status, body = server.post(
        "/v1/chat/completions",
        {"model": NAME, "messages": CHAT, "max_tokens": 1, "user": "me", **nothing},
    )
    assert status == 200, body


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("completions", {}, "prompt", "Missing required parameter: 'prompt'."),
        ("completions", {"prompt": "x", "model": ""}, "model", "at least 1 character"),
        ("completions", {"prompt": "x", "stream_options": 1}, "stream_options", "be an object"),
        ("completions", {"prompt": "x", "colour": 1}, "colour", "argument supplied: colour"),
        ("completions", {"prompt": "x", "temperature": 2.5}, "temperature", "less than or equal"),
        ("completions", {"prompt": ["x"] * 3, "n": QUEUE}, "n", "24 choices are asked for"),
        ("completions", {"prompt": ["x"] * 3, "n": 10**4300 - 1}, "n", "less than or equal to 16"),
        ("completions", {"prompt": "x", "max_tokens": 10**4300 - 1}, "max_tokens", "less than"),
        ("completions", {"prompt": "x", "stop": ["a"] * 5}, "stop", "up to 4 texts"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options", "is true"),
        ("completions", {"prompt": ["x", ""]}, "prompt", "a prompt is empty"),
        ("completions", {"prompt": [1, 5000]}, "prompt", "token id 5000 is outside"),
        ("completions", {"prompt": [1, 1 << 63]}, "prompt", f"id {1 << 63} is outside"),
        ("completions", {"prompt": [10**4298]}, "prompt", "token id 1000"),
        ("completions", {"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias", "id 5000 is out"),
        ("completions", {"prompt": "x", "logit_bias": {"07": 1}}, "logit_bias.07", "pattern"),
        ("completions", {"prompt": "\ud800"}, "prompt", "surrogate"),
        ("completions", {"prompt": "x", "max_tokens": CAPACITY}, None, f"length is {CAPACITY} tok"),
        ("messages", [CHAT[0] | {"refusal": "me"}], "messages[0].refusal", "server: leave it out."),
        (
            "messages",
            [CHAT[0] | {"tool_calls": [1]}],
            "messages[0].tool_calls",
            "not support tools",
        ),
        ("messages", [TOOL], "messages[0].tool_call_id", "not support tools"),
        ("messages", [TOOL | {"tool_call_id": None}], "messages[0].role", "'assistant'"),
        ("messages", [CALL], "messages[0].function_call", "not support tools"),
        ("chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens", "or equal to 1"),
        ("messages", [5], "messages[0]", "Input should be an object"),
        ("messages", [*CHAT, CHAT[0] | {"colour": 1}], "messages[2].colour", "Unrecognized req"),
        ("messages", [{"role": "user", "content": "x " * 4 * CAPACITY}], None, "maximum context"),
    ],
)
def test_bad_fields_are_told_by_name(
    server: Running, path: str, fields: Any, param: str | None, message: str
):
    if path == "messages":  # of a chat
        path, fields = "chat/completions", {"messages": fields}
    status, body = server.post(f"/v1/{path}", {"model": NAME, **fields})
    assert status == 400, body
    assert body["error"]["param"] == param, body
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert len(body["error"]["message"]) < 300


def test_errors_are_the_clients_exceptions(server: Running, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match=f"this server has '{NAME}'") as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x", max_tokens=CAPACITY)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        stranger.completions.create(model=NAME, prompt="x")


def test_every_path_but_health_asks_for_the_key(server: Running):
    for path in ("/v1/models", "/metrics", f"/v1/models/{NAME}"):
        assert server.raw("GET", path, headers={"authorization": ""})[0] == 401, path
        assert server.raw("GET", path, headers={"authorization": f"Basic {KEY}"})[0] == 401, path
        assert server.raw("GET", path)[0] == 200, path
    assert server.raw("GET", "/health", headers={"authorization": ""})[0] == 200


def test_a_key_may_have_any_characters(server: Running):
    with serving(server.engine(), server.tokenizer, keys=("clé-ключ",)) as other:
        for key, status in (("clé-ключ", 200), (" clé-ключ", 200), ("clé-", 401), ("другой", 401)):
            header = {"authorization": f"Bearer {key}".encode()}
            assert other.raw("GET", "/v1/models", headers=header)[0] == status, key


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b'{"model": "another", "model": "small", "prompt": "x"}', 400, "invalid_json"),
        (b'{"model": "small", "prompt": "x", "chat_template_kwargs": NaN}', 400, "invalid_json"),
        (b'{"model": "small", "prompt": "x", "temperature": -Infinity}', 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"prompt": "' + b"x" * BODY + b'"}', 413, "request_too_large"),
    ],
)
def test_bodies_that_are_no_request(server: Running, body: bytes, status: int, code: str | None):
    found, _, answer = server.raw("POST", "/v1/completions", body)
    assert (found, json.loads(answer)["error"]["code"]) == (status, code)


def test_a_body_without_a_length_is_cut_at_the_limit(server: Running):
    # the server may have answered, and left, while we still sent
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection = server.connect((b"x" * 10_000 for _ in range(50)), encode_chunked=True)
        with contextlib.closing(connection):
            assert connection.getresponse().status == 413


def test_a_body_that_does_not_come_is_not_waited_for(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        server.service, "limits", dataclasses.replace(server.service.limits, body_seconds=0.1)
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer"
            f" {KEY}\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"model": ')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_an_engine_that_fails_is_told_to_who_waits_and_to_who_comes(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    engine = server.engine()
    monkeypatch.setattr(engine, "advance", lambda: [][0])
    with serving(engine, server.tokenizer) as broken:
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 4}
        told = "The server had an error: the engine failed: IndexError."
        for _ in range(MAX_FAILURES):
            status, body = broken.post("/v1/completions", asked)
            assert (status, body["error"]["message"]) == (500, told)
        assert broken.service.worker.ended == Counter(failed=MAX_FAILURES)
        status, body = broken.post("/v1/completions", asked)
        assert (status, body["error"]["code"]) == (503, "service_unavailable")
        assert broken.raw("GET", "/health")[0] == 503
    assert server.raw("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/models/", "/v1/completions/", "/metrics/", "/health/", "/api/tags"],
)
def test_unknown_paths(server: Running, path: str):
    status, _, body = server.raw("GET", path)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "unknown_url")
    assert error["message"].startswith(f"Invalid URL (GET {path}): this server has /v1/models, ")
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("DELETE", "/v1/models/", 405)]
)
def test_a_long_path_is_shortened(server: Running, method: str, path: str, status: int):
    refused, _, body = server.raw(method, path + "x" * 5000)
    assert refused == status, body
    assert len(body) < 500


def test_methods_that_a_path_does_not_have(server: Running):
    status, headers, _ = server.raw("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_slot(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
):
    slow_down(server.service.worker.engine, monkeypatch)
    ended = server.service.worker.ended
    before = ended["cancelled"]
    asked = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 200}
    body = json.dumps(asked | {"stream": stream})
    connections = [server.connect(body) for _ in range(SLOTS + 2)]
    if stream:
        assert connections[0].getresponse().readline().startswith(b"data: ")
    else:
        end = time.monotonic() + 20
        while server.service.worker.engine.busy < SLOTS and time.monotonic() < end:
            time.sleep(0.002)
    for connection in connections:
        if connection.sock:
            connection.sock.close()
        connection.close()
    server.until_idle()
    waited = len(connections) - SLOTS
    assert ended["cancelled"] - before > waited, "those with a slot ran to their end"


def test_a_full_queue_refuses_at_once_and_loses_nothing(server: Running, client: openai.OpenAI):
    expected = first_choice(client, max_tokens=100).text
    found, refused = [], []

    def ask() -> None:
        with server.client as another:
            try:
                found.append(first_choice(another, max_tokens=100).text)
            except openai.RateLimitError as error:
                refused.append(error)

    threads = [threading.Thread(target=ask) for _ in range(SLOTS + QUEUE + 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) + len(refused) == len(threads)
    assert len(found) >= QUEUE
    assert refused, "more were accepted than slots and queue hold"
    assert set(found) == {expected}
    assert refused[0].code == "rate_limit_exceeded"
    assert int(refused[0].response.headers["retry-after"]) >= 1


def test_choices_that_the_queue_has_no_room_for_are_told_so_though_it_is_not_full(server: Running):
    server.until_idle()
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 200}
    body = json.dumps(asked | {"n": SLOTS + 1, "stream": True})
    with contextlib.closing(server.connect(body)) as connection:
        assert connection.getresponse().status == 200
        status, answer = server.post("/v1/completions", asked | {"n": QUEUE})
    assert status == 429, answer
    told = f"its slots and its queue of {QUEUE} have no room for this request"
    assert told in answer["error"]["message"]
