"""The model of an engine's tests."""

import pytest

from kvq_models import Llama
from tests.kvq_models.checkpoints import random_llama, tiny_config


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(tiny_config(num_hidden_layers=1))
