"""Arguments are checked as they are: nothing wraps, is truncated or is converted to another
type."""

from __future__ import annotations

import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.size import parameter_bytes
from kvq_models import EMBEDDED, Llama, generate, load_llama, prefill, save_llama
from kvq_models.inference.checked_input import checked_tokens
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_models.llama.layer_kinds import MOST_LAYERS
from kvq_models.llama.stored_tensor import CheckpointError
from tests.kvq_models.checkpoints import random_llama, tiny_config

pytestmark = pytest.mark.usefixtures("types_unchecked")


@functools.cache
def model() -> Llama:
    return random_llama(tiny_config(num_hidden_layers=1))


def new_cache(batch: int = 1) -> kvq.cache.Cache:
    return kvq.init_cache("kivi", model().config, batch, 32)


WRAPPED = ([[1, 2**32 + 5]], "tokens must fit int32, got 4294967301")
CUT = ([[1, 5.9]], "tokens must be integers, got 1.0 of float64")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        WRAPPED,
        CUT,
        ([[True, False]], "tokens must be integers, got True of bool"),
        (
            [[1, 2], [3]],
            "tokens must be integers in an array, and the rows given have different lengths",
        ),
        (np.array([[2**31]], np.uint32), "tokens must fit int32, got 2147483648"),
        ([["1"]], "tokens must be integers"),
        ([[2**70]], "tokens must be integers"),
    ],
)
@pytest.mark.parametrize("call", [prefill, generate])
def test_tokens_that_are_no_int32_are_refused(call, tokens, message):
    with pytest.raises(ValueError, match=message) as refused:
        call(model(), new_cache(), tokens)
    assert "\n" not in str(refused.value)


def test_a_caller_may_change_its_arrays_once_a_call_has_returned():
    """The programs run on after that. JAX takes over memory that is aligned to 64 bytes, so these
    arrays are."""
    memory = np.zeros(64, np.int32)
    start = -memory.ctypes.data % 64 // 4
    tokens, lengths = memory[start : start + 16].reshape(1, 16), memory[start + 16 : start + 17]
    assert tokens.ctypes.data % 64 == lengths.ctypes.data % 64 == 0
    lengths[:] = 16
    taken, held = checked_tokens(model(), new_cache(), tokens, lengths)
    tokens[:], lengths[:] = 7, 3
    np.testing.assert_array_equal(held, [16], err_msg="lengths")
    np.testing.assert_array_equal(taken, np.zeros((1, 16)), err_msg="tokens")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1.5], "integers"), ([2**32 + 1], "fit int32"), ([-1], "between 0 and 2")],
)
def test_lengths_that_would_wrap_or_be_cut_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        prefill(model(), new_cache(), [[1, 2]], lengths)


def test_the_lengths_of_a_step_are_checked():
    with pytest.raises(ValueError, match="lengths must be integers"):
        kvq.begin(new_cache(), 4, [1.5], prefill=True)


def test_a_number_of_new_tokens_is_an_integer():
    with pytest.raises(ValueError, match="max_new_tokens must be integers"):
        generate(model(), new_cache(), [[1]], max_new_tokens=2.5)


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float64", "no_such"])
def test_a_cache_of_another_dtype_is_refused_in_one_line(dtype):
    for make in (kvq.init_cache, kvq.cache.layout, kvq.cache.axes):
        message = (
            f"dtype='{dtype}' is not supported in a cache; supported: bfloat16, float32, float16"
        )
        with pytest.raises(ValueError, match=message) as refused:
            make("kivi", model().config, 1, 32, dtype)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cache_has_its_models_dtype(dtype, tmp_path):
    save_llama(model(), tmp_path)
    llama, _ = load_llama(tmp_path, dtype=dtype)
    cache = kvq.init_cache("kivi", llama.config, 1, 32)
    assert cache.dtype == dtype
    assert cache.layers[0].ring[0].dtype == dtype
    assert kvq.cache.layout("kivi", llama.config, 1, 32).dtype == dtype, (
        "the layout is another than the cache's"
    )
    assert kvq.init_cache("kivi", llama.config, 1, 32, "bfloat16").dtype == "bfloat16", (
        "a dtype that is named counts"
    )
    assert llama.config == read_config(tmp_path), (
        "the dtype is no part of the checkpoint's configuration"
    )


def saved(directory, **fields):
    """Return a checkpoint with these fields in its config.json."""
    save_llama(model(), directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


@pytest.mark.parametrize("layers", [2**31, 100_000])
def test_absurd_numbers_of_layers_are_refused_at_once(layers, tmp_path, run):
    directory = saved(tmp_path, num_hidden_layers=layers)
    message = f"num_hidden_layers={layers} must be at most {MOST_LAYERS}"
    with pytest.raises(ValueError, match=message):
        load_llama(directory)
    code, _, error = run("memory", directory, "--cache", "kivi", "--context", 64)
    assert (code, error.count("\n")) == (2, 1), error
    assert message in error


def test_more_layers_than_the_files_hold_are_missed_before_they_are_made(tmp_path):
    directory = saved(tmp_path, num_hidden_layers=MOST_LAYERS)
    with pytest.raises(
        CheckpointError,
        match=r"lack tensor 'model.layers.1.self_attn.q_proj.weight' and more: they hold 1 layers",
    ):
        load_llama(directory)
    config = read_config(directory)
    assert len(parameter_bytes(kvq.cache.layout("kivi", config, 1, 32))) == MOST_LAYERS


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_pipe_with_the_name_of_a_checkpoints_file_is_refused(name, tmp_path):
    directory = saved(tmp_path)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=f"{name}' is not a regular file"):
        open_checkpoint(directory)


def test_a_tokenizers_longest_text_is_a_number(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(f"{EMBEDDED}/{name}", tmp_path)
    assert open_checkpoint(tmp_path).tokenizer() is not None
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    with pytest.raises(CheckpointError, match="model_max_length='x', which is no number"):
        open_checkpoint(tmp_path).tokenizer()


def test_traced_tokens_keep_their_shape_and_are_checked_for_their_dtype():
    cache = new_cache()
    logits, _ = jax.eval_shape(
        lambda c, t: prefill(model(), c, t, logits="all"), cache, jnp.zeros((1, 5), jnp.int32)
    )
    assert logits.shape == (1, 5, 96)
    with pytest.raises(ValueError, match="tokens must be integers, got float32"):
        jax.eval_shape(lambda c, t: prefill(model(), c, t), cache, jnp.zeros((1, 5), jnp.float32))
