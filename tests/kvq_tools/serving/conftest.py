"""One server for the tests of all files here."""

import pathlib
from collections.abc import Iterator

import openai
import pytest

from tests.kvq_tools.serving.running import Running, running


@pytest.fixture(scope="session")
def server(shallow: pathlib.Path) -> Iterator[Running]:
    with running(shallow) as serving:
        yield serving


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client
    server.until_idle()
