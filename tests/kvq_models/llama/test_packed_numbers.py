"""Matrices of 16 bits stay as a safetensors checkpoint stores them: the same values, the tokens of
widened weights, and the default for large checkpoints on a CPU."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvq_models.llama import packed_loading, packed_weights
from kvq_models.llama.checkpoint import CheckpointError, load_llama, save_llama
from kvq_models.llama.model import forward
from kvq_models.llama.packed_loading import dense_llama, holds_packed
from tests.kvq_models.checkpoints import CASES, random_llama, random_tokens, row_errors, tiny_config

CONFIG = tiny_config(num_hidden_layers=1)
MIXTRAL = tiny_config("mixtral", **CASES["mixtral"].fields, num_hidden_layers=1)
_logits = jax.jit(forward)


def saved(path: pathlib.Path, config=CONFIG, dtype: str = "bfloat16") -> pathlib.Path:
    save_llama(random_llama(config, dtype=dtype), path)
    return path


@pytest.mark.parametrize(
    ("config", "dtype"), [(CONFIG, "bfloat16"), (CONFIG, "float16"), (MIXTRAL, "bfloat16")]
)
def test_numbers_of_16_bits_keep_their_values_and_compute_the_same_logits(
    config, dtype: str, tmp_path: pathlib.Path
):
    path = saved(tmp_path / "m", config, dtype)
    packed, dense = (load_llama(path, dtype="float32", weights=w)[0] for w in ("packed", "dense"))
    leaves = jax.tree.leaves(packed, is_leaf=packed_weights.is_packed)
    packed_leaves = [leaf for leaf in leaves if packed_weights.is_packed(leaf)]
    assert len(packed_leaves) == 2 + 4 + (3 if config is CONFIG else 4)  # with the router
    assert {leaf.bits for leaf in packed_leaves} == {16}
    jax.tree.map(np.testing.assert_array_equal, dense_llama(packed), dense)
    tokens = random_tokens((1, 6))
    wanted = _logits(dense, tokens)
    assert row_errors(_logits(packed, tokens), wanted).max() < 1e-5
    other = random_llama(config, seed=1)
    assert row_errors(_logits(other, tokens), wanted).min() > 1e-3, "any model passes"
    assert "16 bits" in packed_loading.in_words(packed)


def test_the_default_keeps_large_checkpoints_on_a_cpu_with_kernels(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = saved(tmp_path / "m")
    assert not holds_packed(load_llama(path, dtype="float32")[0]), "it fits a processor's cache"
    monkeypatch.setattr(packed_loading, "MIN_BYTES", 0)
    native = packed_weights.unavailable() is None
    assert holds_packed(load_llama(path, dtype="float32")[0]) == native
    assert not holds_packed(load_llama(path, dtype="float16")[0]), "float16 rounds these values"
    monkeypatch.setattr(packed_loading, "unavailable", lambda: "no library")
    assert not holds_packed(load_llama(path, dtype="float32")[0])


def test_int8_activations_round_nothing_that_meets_numbers_of_16_bits(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="is for packed integers of 4 or 8 bits"):
        load_llama(saved(tmp_path / "m"), weights="packed", activations="int8")


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float, tmp_path: pathlib.Path):
    llama = random_llama(CONFIG, dtype="bfloat16")
    kernel = llama.layers[0].mlp.down_proj.kernel
    kernel.set_value(kernel[...].at[3, 5].set(bad))
    save_llama(llama, tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"down_proj.weight' holds nan, or values beyond"):
        load_llama(tmp_path / "m", dtype="float32", weights="packed")
