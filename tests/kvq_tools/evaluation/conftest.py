"""A tiny model in a directory, for the tests of commands."""

from __future__ import annotations

import pytest

from kvq_models import save_llama
from laboratory.embedded_model.tokenizer import save_tokenizer, train_tokenizer
from tests.kvq_models.checkpoints import random_llama, tiny_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a directory with a random one-layer model and a tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    save_llama(
        random_llama(tiny_config(vocab_size=300, num_hidden_layers=1, max_position_embeddings=256)),
        directory,
    )
    save_tokenizer(train_tokenizer(["one two three four"] * 3, 300), directory, 256)
    return directory
