"""kvq quantize-weights: a checkpoint with few distinct weights, an ordinary or a packed one, or one
line and nothing written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models import load_llama
from kvq_models.llama import hf_names
from kvq_models.llama.packed_weights import unavailable
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
    before, _ = load_llama(model, dtype="float32")
    after, tokenizer = load_llama(out, dtype="float32")
    assert tokenizer(PROMPT).input_ids
    path = "layers.0.mlp.up_proj.kernel"
    kernel = np.asarray(hf_names.weights(after)[path].leaf)
    assert max(len(np.unique(column)) for column in kernel.T) <= 8
    assert not jnp.array_equal(hf_names.weights(before)[path].leaf, kernel)
    assert jnp.array_equal(before.embed[...], after.embed[...])


def test_a_packed_checkpoint_has_the_same_weights_in_fewer_bytes(model, text, tmp_path, run_json):
    found = {}
    for name, options in (("dense", ()), ("packed", ("--packed",))):
        sizes = ("--bits", 4, "--sparse", 0.01, "--text", text, "--out", tmp_path / name, *SIZES)
        found[name] = run_json("quantize-weights", model, *options, *sizes)
    assert [found[name]["packed"] for name in found] == [False, True]
    assert found["packed"]["bytes"] < found["dense"]["bytes"]
    packed, dense, before = (
        load_llama(at, dtype="float32", weights="dense")[0]
        for at in (tmp_path / "packed", tmp_path / "dense", model)
    )
    jax.tree.map(np.testing.assert_array_equal, packed, dense)
    path = "layers.0.mlp.up_proj.kernel"
    kernels = (hf_names.weights(llama)[path].leaf for llama in (before, packed))
    assert not jnp.array_equal(*kernels), "nothing is quantized"
    generated = run_json("generate", tmp_path / "packed", "--prompt", "1", "--max-new-tokens", 2)
    assert generated["weights"] == ("dense" if unavailable() else "packed")
