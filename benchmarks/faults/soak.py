"""Many connections with mixed traffic for some minutes: nothing of the server's process grows, and
equal requests get equal answers."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.faults.clients import TALE, Server, head_of, junk, serving
from benchmarks.faults.report import SoakSample

CONNECTIONS, SAMPLES, SECONDS = 200, 12, 300
SIZE = ("--slots", "8", "--capacity", "256", "--queue", "400")
WORDS = ("it", "was", "a", "dark", "and", "stormy", "night", "in", "the", "old", "town")


class Tally:
    """Counts of all clients, under a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers = self.wrong = self.failed = 0
        self.known: dict[str, object] = {}

    def add(self, asked: str, answer: object) -> None:
        with self.lock:
            self.answers += 1
            self.wrong += self.known.setdefault(asked, answer) != answer


def request_of(rng: np.random.Generator) -> tuple[str, dict]:
    """Return one of some hundred requests, a third of them chats, so that most come again."""
    start, count = int(rng.integers(8)), int(rng.integers(1, 40))
    text = " ".join(WORDS[(start + i) % len(WORDS)] for i in range(count))
    fields = {"model": "embedded", "max_tokens": 4 + start, "temperature": start % 2, "seed": start}
    if start % 4 == 3:
        fields |= {"echo": True, "logprobs": 2}
    elif count % 3 == 0:
        return "/v1/chat/completions", fields | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", fields | {"prompt": text, "n": 1 + (start == 5)}


def client(server: Server, seed: int, tally: Tally, stop: threading.Event) -> None:
    """Ask, and now and then send nonsense, or leave in the middle of a stream."""
    rng = np.random.default_rng(seed)
    while not stop.is_set():
        try:
            if rng.random() < 0.05:
                body = json.dumps(TALE).encode()
                with server.connect() as connection:
                    connection.sendall(head_of(body) + body)
                    connection.recv(int(rng.integers(1, 500)))
                continue
            path, fields = request_of(rng)
            if rng.random() < 0.05:
                fields["messages" if "chat" in path else "prompt"] = junk(rng)
            asked = json.dumps(fields)
            status, body = server.post(path, asked.encode(), SECONDS)
            if status == 200:
                tally.add(asked, json.loads(body)["choices"])
            elif status >= 500:
                raise OSError(status)
            elif status == 429:
                stop.wait(0.2)
        except (OSError, http.client.HTTPException):
            if not stop.is_set():
                with tally.lock:
                    tally.failed += 1
        stop.wait(rng.uniform(0, 0.5))


def sample(server: Server, tally: Tally, seconds: float) -> SoakSample:
    process = Path("/proc") / str(server.process.pid)
    pages = int((process / "statm").read_text().split()[1])
    with tally.lock:
        return SoakSample(
            seconds,
            tally.answers,
            tally.wrong,
            tally.failed,
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())),
        )


def soak(minutes: float, connections: int = CONNECTIONS) -> Iterator[SoakSample]:
    """Yield samples at equal times, the first one when all clients are there."""
    with serving(size=SIZE) as server:
        tally, stop = Tally(), threading.Event()
        threads = [
            threading.Thread(target=client, args=(server, seed, tally, stop), daemon=True)
            for seed in range(connections)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        try:
            for number in range(SAMPLES + 1):
                due = began + number * minutes * 60 / SAMPLES
                time.sleep(max(0, due - time.monotonic()))
                one = sample(server, tally, time.monotonic() - began)
                print(f"soak: {one}", flush=True)
                yield one
        finally:
            stop.set()
            for thread in threads:
                thread.join(SECONDS)
