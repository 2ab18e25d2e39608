"""A small checkpoint, saved."""

import pathlib

import pytest

from kvq_models.llama.checkpoint import save_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    save_llama(random_llama(tiny_config()), tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def floats(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Qwen2 checkpoint in floats, with biases and a head of its own."""
    directory = tmp_path_factory.mktemp("floats")
    save_llama(random_llama(tiny_config("qwen2")), directory)
    return directory
