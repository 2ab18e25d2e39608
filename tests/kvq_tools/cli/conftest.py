"""A model that chats."""

import json
import pathlib
import shutil

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
