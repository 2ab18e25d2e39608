"""A model that chats, and commands that may not read weights."""

import json
import pathlib
import shutil
from collections.abc import Callable

import pytest

from kvq_models.llama import checkpoint
from tests.kvq_models.checkpoints import CHAT_TEMPLATE


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """no_weights() lets a command that reads weights from then on fail."""

    def stop(*_: object, **__: object) -> None:
        raise ValueError("weights were read")

    return lambda: monkeypatch.setattr(checkpoint, "load_weights", stop)


@pytest.fixture(scope="module")
def talker(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The model with a chat template that strips messages, as Llama 3's does."""
    directory = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(model, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return directory
