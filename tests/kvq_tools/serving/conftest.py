"""Servers for the tests of all files here."""

import pathlib
from collections.abc import Iterator

import openai
import pytest

from kvq_tools.serving.connections import ConnectionLimits
from kvq_tools.serving.guard import known_hosts
from tests.kvq_tools.serving.running import KEY, Running, running, serving


@pytest.fixture(scope="session")
def server(shallow: pathlib.Path) -> Iterator[Running]:
    with running(shallow) as serving:
        yield serving


@pytest.fixture(scope="session")
def guarded(server: Running) -> Iterator[Running]:
    """A server that expects headers within 0.3 s and answers within 0.5 s of being told to end."""
    limits = ConnectionLimits(maximum=6, header_seconds=0.3, unread_seconds=0.5)
    with serving(
        server.engine(),
        server.tokenizer,
        keys=(KEY, "another"),
        connections=limits,
        hosts=known_hosts("127.0.0.1", ["kvq.example.com"]),
        origins=["https://friend.example.com"],
    ) as other:
        yield other


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client
    server.until_idle()
