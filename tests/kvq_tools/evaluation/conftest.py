"""A tiny model in a directory, for the tests of commands."""

import pytest

from tests.kvq_models.checkpoints import save_with_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a directory with a random one-layer model and a tokenizer."""
    return save_with_tokenizer(tmp_path_factory.mktemp("tiny"), "one two three four" * 3)
