"""A server listens before its programs are compiled."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI

from kvq_tools.serving.server import serve
from kvq_tools.serving.sockets import bound_socket
from kvq_tools.serving.worker import Worker
from tests.kvq_tools.serving.running import NAME, PROMPT, Running, serving

WAIT = 20  # seconds


def test_requests_wait_while_programs_are_compiled(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    engine, compiled = server.engine(), threading.Event()
    monkeypatch.setattr(engine, "warm_up", lambda wait: compiled.wait(WAIT))
    with (
        serving(engine, server.tokenizer, warm_up=True) as starting,
        ThreadPoolExecutor(1) as client,
    ):
        status, _, health = starting.raw("GET", "/health")
        assert (status, json.loads(health)["status"]) == (503, "compiling")
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        answer = client.submit(starting.post, "/v1/completions", asked)
        end = time.monotonic() + WAIT
        while not starting.service.worker.waiting:
            assert time.monotonic() < end, "the request is not accepted"
            time.sleep(0.01)
        assert not answer.done()
        compiled.set()
        assert answer.result(WAIT) is not None
        assert answer.result()[0] == 200
        status, _, health = starting.raw("GET", "/health")
        assert (status, json.loads(health)["status"]) == (200, "ok")


def test_a_server_ends_with_the_error_of_a_program_that_cannot_be_compiled(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    def no_room(wait: bool) -> None:
        raise RuntimeError("no room for a program")

    engine = server.engine()
    monkeypatch.setattr(engine, "warm_up", no_room)
    worker = Worker(engine)
    bound = bound_socket("127.0.0.1", 0)
    with bound, pytest.raises(RuntimeError, match="no room for a program"):
        serve(FastAPI(), worker, bound)
    assert worker.failure == "its programs cannot be compiled: RuntimeError"


def test_nobody_waits_for_a_compiler_at_the_end(server: Running, monkeypatch: pytest.MonkeyPatch):
    engine, compiled = server.engine(), threading.Event()
    monkeypatch.setattr(engine, "warm_up", lambda wait: compiled.wait(WAIT))
    worker = Worker(engine)
    worker.start()
    before = time.monotonic()
    worker.stop()
    assert time.monotonic() - before < WAIT / 2
    assert worker.compiling, "the control: the compiler is still at work"
    compiled.set()
    worker._thread.join(WAIT)
    assert not worker._thread.is_alive()
