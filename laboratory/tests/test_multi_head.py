"""A model converted to one KV head for each query head."""

import pathlib

import numpy as np
import pytest

from kvq_models import load_llama
from kvq_models.llama.model import forward
from laboratory import multi_head
from tests.kvq_models.checkpoints import random_tokens, save_with_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


def test_the_converted_model_has_the_same_outputs(tmp_path: pathlib.Path):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    model = save_with_tokenizer(tmp_path / "shared", TEXT, **heads)
    multi_head.main(["--model", str(model), str(tmp_path / "each")])
    before, _ = load_llama(model, dtype="float32")
    after, tokenizer = load_llama(tmp_path / "each", dtype="float32")
    assert (before.config.num_key_value_heads, after.config.num_key_value_heads) == (2, 6)
    assert tokenizer.encode(TEXT)
    tokens = random_tokens((1, 24))
    expected, logits = (np.asarray(forward(llama, tokens)) for llama in (before, after))
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(logits - np.roll(expected, 1, axis=1)).max() > 1e-2, "other tokens' would pass"


def test_heads_of_a_group_are_neighbours():
    weight = np.arange(8.0).reshape(4, 2)
    repeated = multi_head.repeated(weight, 2, 2)
    assert repeated[:, 0].tolist() == [0, 2, 0, 2, 4, 6, 4, 6]
    assert multi_head.repeated(weight[:, 0], 2, 2).tolist() == [0, 2, 0, 2, 4, 6, 4, 6]
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(np.tile(weight, (2, 1)), repeated)
