"""A server in this process, on a free port, with two layers of the embedded model: compiled once
for all of its tests."""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest

from kvq_models import load_llama
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.engine.requests import Event
from kvq_models.inference.sampling import Sampling
from kvq_tools.serving.app import create_app
from kvq_tools.serving.connections import ConnectionLimits
from kvq_tools.serving.metrics import Metrics
from kvq_tools.serving.server import server_of
from kvq_tools.serving.service import Limits, Service
from kvq_tools.serving.sockets import bound_socket
from kvq_tools.serving.worker import Worker

KEY, NAME, SPEC = "a-secret-key", "small", "kivi:bits=2,recent=16,block=32"
SLOTS, CAPACITY, QUEUE, WIDTHS = 3, 256, 8, (16, 64)
BODY = 100_000  # bytes
EMPTY: Mapping[str, str] = {}
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
PROMPT = "It is a truth universally acknowledged, that"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


@dataclasses.dataclass
class Running:
    """A server's url and client, its tokenizer and its weights."""

    url: str
    port: int
    llama: Any
    tokenizer: Any
    service: Service
    server: Any
    thread: threading.Thread

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def engine(self) -> Engine:
        """Return an engine like the server's, which runs the same programs, but reads every
        prompt."""
        return Engine(self.llama, SPEC, slots=SLOTS, capacity=CAPACITY, widths=WIDTHS)

    def connect(self, body: Any = None, path: str = "/v1/completions", method: str = "POST", **of):
        """Return a connection on which a request was sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, HEADERS | of.pop("headers", {}), **of)
        return connection

    def raw(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, Any] = EMPTY
    ) -> tuple[int, dict, bytes]:
        """Return (status, headers, body) of a request that no client library would send."""
        with contextlib.closing(self.connect(body, path, method, headers=headers)) as connection:
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def post(self, path: str, fields: Any) -> tuple[int, dict]:
        status, _, body = self.raw("POST", path, json.dumps(fields).encode())
        return status, json.loads(body)

    def until_idle(self) -> None:
        """Wait until every slot is vacant."""
        worker, end = self.service.worker, time.monotonic() + 20
        while worker._unended or worker.engine.busy:
            assert time.monotonic() < end, f"{worker.engine.busy} slots are still taken"
            time.sleep(0.01)


def slow_down(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of an engine take 50 ms more, so that no answer ends before its client is seen
    to be gone, on a fast machine either."""
    advance = engine.advance

    def delayed() -> list[Event]:
        time.sleep(0.05)
        return advance()

    monkeypatch.setattr(engine, "advance", delayed)


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Running]:
    """Serve the model in a folder until the block ends."""
    llama, tokenizer = load_llama(folder, dtype="float32")
    sizes = {"slots": SLOTS, "capacity": CAPACITY, "widths": WIDTHS, "queue_limit": QUEUE}
    engine = Engine(llama, SPEC, **sizes, prefixes=PrefixStore(64 << 20))
    engine.warm_up()
    with serving(engine, tokenizer) as server:
        yield server


@contextlib.contextmanager
def serving(
    engine: Engine,
    tokenizer: Any,
    *,
    keys: Sequence[str] = (KEY,),
    connections: ConnectionLimits | None = None,
    grace_seconds: float = 60,
    warm_up: bool = False,
    **guarded: Collection[str],
) -> Iterator[Running]:
    """Serve an engine until the block ends. guarded: hosts and origins for `create_app`. warm_up:
    True if the worker warms the engine up."""
    metrics = Metrics()
    worker = Worker(engine, metrics.first_token.observe, warm_up=warm_up)
    metrics.watch(worker)
    service = Service(
        worker,
        tokenizer,
        NAME,
        metrics,
        chat_template=TEMPLATE,
        limits=Limits(body=BODY),
        defaults=Sampling(1.0),
    )
    ready = threading.Event()
    app = create_app(service, keys, **guarded)
    server = server_of(app, ready.set, limits=connections, grace_seconds=grace_seconds)
    bound = bound_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    if connections is not None:
        # what a client does not read stays in the process
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    worker.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    assert ready.wait(30), "the server does not start"
    try:
        url = f"http://127.0.0.1:{port}"
        yield Running(url, port, engine.llama, tokenizer, service, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        worker.stop()
        bound.close()
        service.prompts.close()
