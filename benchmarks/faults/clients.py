"""Faults of clients: those that vanish, those that are slow, and requests that make no sense.

The server is `kvq serve embedded` in a process of its own. After each fault another client asks a
question, whose answer must come in time and be the same as ever.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.faults.outcome import Inject, Outcome
from kvq_tools.serving import fields

SERVE = ("serve", "embedded", "--cache", "kivi:bits=2,recent=16,block=32", "--port", "0", "--json")
SIZE = ("--slots", "4", "--capacity", "192", "--queue", "16", "--grace", "5")
QUESTION: dict[str, Any] = {
    "model": "embedded",
    "prompt": "It was a dark night",
    "max_tokens": 6,
    "temperature": 0,
    "logprobs": 1,
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
TALE = QUESTION | {"max_tokens": 100, "stream": True}
SECONDS, START_SECONDS = 30, 300
REFUSED = (400, 401, 403, 404, 405, 408, 413, 415, 429)
TRUSTING = """
import sys
from kvq_tools.serving import fields
fields.read = lambda kind, body, **_: kind.model_construct(**body)
from kvq_tools.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Server(NamedTuple):
    """A server's process and port, and its first answer to QUESTION."""

    process: subprocess.Popen[str]
    port: int
    answer: object

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def post(
        self, path: str, body: bytes, seconds: float = SECONDS, **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def asked(self, seconds: float = SECONDS) -> Outcome:
        """Ask QUESTION, again while the server is full."""
        end = time.monotonic() + seconds
        while True:
            try:
                left = max(0.1, end - time.monotonic())
                status, body = self.post("/v1/completions", json.dumps(QUESTION).encode(), left)
            except TimeoutError:
                return Outcome(False, "hang", f"no answer within {seconds} s")
            except OSError as error:
                return Outcome(False, "crash", f"{type(error).__name__}: {error}")
            if status in (429, 503) and time.monotonic() < end:
                time.sleep(0.05)
                continue
            if status != 200:
                return Outcome(False, "crash", body.decode(errors="replace"))
            return Outcome(False, "right" if choices(body) == self.answer else "wrong")


def choices(body: bytes) -> object:
    return json.loads(body)["choices"]


@contextlib.contextmanager
def serving(
    command: Sequence[str] = ("-m", "kvq_tools"), size: Sequence[str] = SIZE
) -> Iterator[Server]:
    """Start a server and wait until it answers."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.NamedTemporaryFile("w") as template:
        template.write(TEMPLATE)
        template.flush()
        process = subprocess.Popen(
            [sys.executable, *command, *SERVE, *size, "--chat-template", template.name],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line == "}\n":
                    break
            if process.poll() is not None or not lines:
                errors.seek(0)
                raise RuntimeError(f"kvq serve does not start: {errors.read()}")
            port = int(json.loads("".join(lines))["url"].rpartition(":")[2])
            server = Server(process, port, None)
            status, body = server.post(
                "/v1/completions", json.dumps(QUESTION).encode(), START_SECONDS
            )
            assert status == 200, body
            yield server._replace(answer=choices(body))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            with process:
                pass


def head_of(body: bytes) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()


@contextlib.contextmanager
def vanished_clients(folder: Path) -> Iterator[Inject]:
    """Send a part of a request, or all of it, read a part of the answer, and go, sometimes with a
    reset. Without checks: the server's process is stopped in the meantime."""
    with serving() as server:

        def inject(number: int, checked: bool) -> Outcome:
            rng, body = np.random.default_rng(number), json.dumps(TALE).encode()
            sent = head_of(body) + body
            if rng.random() < 0.4:
                sent = sent[: int(rng.integers(1, len(sent)))]
            with server.connect() as connection:
                connection.sendall(sent)
                if rng.random() < 0.5:
                    connection.setblocking(False)
                    time.sleep(rng.uniform(0, 0.05))
                    with contextlib.suppress(BlockingIOError):
                        connection.recv(int(rng.integers(1, 2000)))
                if rng.random() < 0.5:  # reset
                    gone = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone)
            return _answered(server, checked)

        yield inject


def _answered(server: Server, checked: bool) -> Outcome:
    if checked:
        return server.asked()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        return server.asked(0.5)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def slow_clients(folder: Path) -> Iterator[Inject]:
    """Open a connection that sends byte by byte, or does not read, and keep it while 100 further
    ones come. Without checks: the server's process is stopped in the meantime."""
    slow: deque[socket.socket] = deque()
    with serving() as server, contextlib.ExitStack() as stack:

        def inject(number: int, checked: bool) -> Outcome:
            rng, body = np.random.default_rng(number), json.dumps(TALE).encode()
            sent = head_of(body) + body
            connection = stack.enter_context(server.connect())
            slow.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(sent[: int(rng.integers(1, len(sent) + 1))])
            if len(slow) > 100:
                slow.popleft().close()
            for other in slow:
                with contextlib.suppress(OSError):
                    other.send(b"x")
            return _answered(server, checked)

        yield inject


JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**70),
    10**400,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\x00",
    "é" * 300,
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [[1, -5]],
    {"a": {"b": [1]}},
    [1, "x"],
    [10**9],
    ["x"] * 50,
)


def junk(rng: np.random.Generator) -> Any:
    return copy.deepcopy(JUNK[int(rng.integers(len(JUNK)))])


def made(schema: dict[str, Any], root: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return a value that a JSON schema allows, or nearly."""
    if "$ref" in schema:
        return made(root["$defs"][schema["$ref"].rpartition("/")[2]], root, rng)
    if "anyOf" in schema:
        return made(schema["anyOf"][int(rng.integers(len(schema["anyOf"])))], root, rng)
    if "const" in schema or "enum" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return allowed[int(rng.integers(len(allowed)))]
    match schema.get("type"):
        case "string":
            return str(rng.choice(["It was", "Name a river.", "<|endoftext|>", "é", "x" * 200]))
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 6)
            return int(rng.choice([low, min(low + 1, high), int(min(high, 6))]))
        case "number":
            low, high = float(schema.get("minimum", 0)), float(schema.get("maximum", 1))
            return float(rng.choice([low, high, rng.uniform(low, high)]))
        case "boolean":
            return bool(rng.integers(2))
        case "array":
            return [made(schema["items"], root, rng) for _ in range(int(rng.integers(1, 4)))]
        case "object" if "properties" in schema:
            return {
                name: made(one, root, rng)
                for name, one in schema["properties"].items()
                if name in schema.get("required", ()) or rng.random() < 0.15
            }
        case "object":
            return {str(int(rng.integers(3000))): 1.5} if rng.random() < 0.5 else {}
    return None


def request_of(rng: np.random.Generator) -> tuple[str, bytes]:
    """Return a path and a body: a valid request with some parts replaced, or bytes that are cut or
    flipped."""
    chat = bool(rng.integers(2))
    kind = fields.ChatFields if chat else fields.CompletionFields
    schema = kind.model_json_schema()
    body = made(schema, schema, rng) | {
        "model": QUESTION["model"],
        "max_tokens": int(rng.integers(7)),
    }
    for _ in range(int(rng.integers(0, 4))):
        holder: Any = body
        while isinstance(holder, dict | list) and holder:
            names = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            name = names[int(rng.integers(len(names)))]
            if not isinstance(holder[name], dict | list) or rng.random() < 0.5:
                holder[name] = junk(rng)
                break
            holder = holder[name]
    if rng.random() < 0.1:
        body[str(rng.choice([*fields.NEUTRAL, "unknown", "é"]))] = junk(rng)
    encoded = bytearray(json.dumps(body).encode())
    if rng.random() < 0.1:
        encoded[int(rng.integers(len(encoded)))] ^= 1 << int(rng.integers(8))
    if rng.random() < 0.03:
        del encoded[int(rng.integers(len(encoded))) :]
    paths = ["/v1/chat/completions" if chat else "/v1/completions"] * 20
    paths += ["/v1/completions", "/v1/models", "/health", "/v1/models/x", "/", "/v1/embeddings"]
    return str(rng.choice(paths)), bytes(encoded)


@contextlib.contextmanager
def malformed_requests(folder: Path) -> Iterator[Inject]:
    """Send requests made from the API's own schema, with wrong values in any place. Without checks:
    a server that believes every field."""
    with serving() as checking, serving(("-c", TRUSTING)) as trusting:

        def inject(number: int, checked: bool) -> Outcome:
            server = checking if checked else trusting
            path, body = request_of(np.random.default_rng(number))
            try:
                status, answer = server.post(path, body)
            except TimeoutError:
                return Outcome(False, "hang", f"{path} {body[:500]!r}")
            except (OSError, http.client.HTTPException) as error:
                return Outcome(False, "crash", f"{type(error).__name__}, {path} {body[:500]!r}")
            if status != 200 and not (status in REFUSED and _is_error(answer)):
                return Outcome(False, "crash", f"{status}, {path} {body[:500]!r}")
            after = server.asked() if number % 10 == 0 else Outcome(False, "right")
            return after if after.bad else Outcome(status != 200, "right")

        yield inject


def _is_error(answer: bytes) -> bool:
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return {"message", "type", "param", "code"} == set(error)
