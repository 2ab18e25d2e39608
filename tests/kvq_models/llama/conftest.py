"""A small checkpoint, saved."""

from __future__ import annotations

import pathlib

import pytest

from kvq_models.llama.checkpoint import save_llama
from tests.kvq_models.checkpoints import random_llama, tiny_config


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    save_llama(random_llama(tiny_config()), tmp_path)
    return tmp_path
