"""kvq quantize-weights: an ordinary checkpoint with few distinct weights, or one line and nothing
written."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models import load_llama
from kvq_models.llama import hf_names
from tests.kvq_models.checkpoints import PROMPT

SIZES = ("--samples", 1, "--length", 24)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(PROMPT * 5)
    return file


def test_the_checkpoint_is_an_ordinary_one_with_few_weights(model, text, tmp_path, run_json):
    out = tmp_path / "w3"
    found = run_json("quantize-weights", model, "--bits", 3, "--text", text, "--out", out, *SIZES)
    assert found["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert found["bits_per_weight"] > 3
    assert 0 < found["weighted_error"] < 0.2
    (before, _), (after, tokenizer) = (
        load_llama(model, dtype="float32"),
        load_llama(out, dtype="float32"),
    )
    assert tokenizer(PROMPT).input_ids
    path = "layers.0.mlp.up_proj.kernel"
    kernel = np.asarray(hf_names.weights(after)[path].leaf)
    assert max(len(np.unique(column)) for column in kernel.T) <= 8
    assert not jnp.array_equal(hf_names.weights(before)[path].leaf, kernel)
    assert jnp.array_equal(before.embed[...], after.embed[...])
