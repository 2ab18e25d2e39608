"""Requests made from the API's own schema, with wrong values in any place, as benchmarks.faults
sends them."""

import contextlib
import json
import types
from collections.abc import Iterator

import pytest

from benchmarks.faults import clients
from benchmarks.faults.kinds import KINDS
from tests.kvq_tools.serving.running import NAME, Running, serving


@pytest.fixture
def open_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[clients.Server]:
    """A server without a key, in place of the process that the kinds start."""
    with serving(server.engine(), server.tokenizer) as other, pytest.MonkeyPatch.context() as patch:
        for fields in (clients.QUESTION, clients.TALE):
            patch.setitem(fields, "model", NAME)
        post = clients.Server.post

        def with_key(self: clients.Server, path: str, body: bytes, seconds: float = 30):
            return post(self, path, body, seconds, authorization="Bearer a-secret-key")

        patch.setattr(clients.Server, "post", with_key)
        first = clients.Server(types.SimpleNamespace(pid=0), other.port, None)
        _, answer = first.post("/v1/completions", json.dumps(clients.QUESTION).encode())
        known = first._replace(answer=clients.choices(answer))
        patch.setattr(clients, "serving", lambda *_, **__: contextlib.nullcontext(known))
        yield known


def test_requests_with_wrong_values_anywhere_are_answered_or_refused(
    open_server: clients.Server, tmp_path
):
    with KINDS["malformed requests"].kind()(tmp_path) as inject:
        outcomes = [inject(number, True) for number in range(90)]
    assert not [one for one in outcomes if one.bad]
    assert sum(one.detected for one in outcomes) > 30
    assert open_server._replace(answer="another").asked().result == "wrong", "it sees nothing"
    assert open_server._replace(port=1).asked().result == "crash"
