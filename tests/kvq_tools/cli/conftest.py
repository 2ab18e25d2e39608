"""A model that chats, and a process that Ctrl-C interrupts."""

import json
import pathlib
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.kvq_models.checkpoints import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def talker(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The model with a chat template that strips messages, as Llama 3's does."""
    directory = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(model, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return directory


@pytest.fixture
def sigint() -> Iterator[None]:
    """Let SIGINT interrupt this process. In a shell's background job it is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
