"""Arguments are checked as they are: nothing wraps, is truncated or is converted to another
type."""

import functools
import json
import os
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.size import parameter_bytes
from kvq_models import (
    EMBEDDED,
    FlatLlama,
    Sampling,
    decode_step,
    generate,
    generate_drafted,
    load_llama,
    prefill,
    prepare,
    save_llama,
    score,
)
from kvq_models.inference.checked_input import checked_tokens
from kvq_models.llama.checkpoint import open_checkpoint, read_config
from kvq_models.llama.layer_kinds import MAX_LAYERS
from kvq_models.llama.stored_tensor import CheckpointError
from tests.kvq_models import checkpoints
from tests.kvq_models.checkpoints import tiny_config

pytestmark = pytest.mark.usefixtures("types_unchecked")
model = functools.partial(checkpoints.model, num_hidden_layers=1)


def new_cache(batch: int = 1) -> kvq.cache.Cache:
    return kvq.init_cache("kivi", model().config, batch, 32)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[1, 2**32 + 5]], None, "tokens must fit int32, got 4294967301"),
        (np.array([[2**31]], np.uint32), None, "tokens must fit int32, got 2147483648"),
        ([[1, 5.9]], None, "tokens must be integers, got 1.0 of float64"),
        ([[True, False]], None, "tokens must be integers, got True of bool"),
        ([[1, 2], [3]], None, "tokens must be integers in an array, and the rows given have"),
        ([["1"]], None, "tokens must be integers"),
        ([[2**70]], None, "tokens must be integers"),
        (np.zeros((1, 33), int), None, "row 0 needs 3[34] tokens .* capacity is 32"),
        ([[1, 96]], None, "token id 96 at row 0, position 1 is outside the vocabulary of 96"),
        ([[-1]], None, "token id -1"),
        (np.zeros((3, 4), int), None, r"tokens must be \[batch, length\] with batch 1"),
        (np.zeros((4,), int), None, "got shape"),
        ([[1, 2]], [5], "lengths must be between 0 and 2"),
        ([[1, 2]], [-1], "lengths must be between 0 and 2"),
        ([[1, 2]], [2, 2], "lengths must be"),
        ([[1, 2]], [1.5], "lengths must be integers"),
        ([[1, 2]], [2**32 + 1], "lengths must fit int32"),
    ],
)
def test_bad_tokens_are_refused_in_one_line(tokens, lengths, message):
    cache = new_cache()
    for call in (prefill, functools.partial(generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match=message) as refused:
            call(model(), cache, tokens, lengths)
        assert "\n" not in str(refused.value)
        assert cache.lengths.tolist() == [0], "the cache's buffers were consumed"


def one_layer() -> Any:
    return kvq.layer_plan("dense", model().config, layer=0, capacity=8).init(1)


def generated(cache: Any = None, **options: Any) -> Any:
    return generate(model(), cache or new_cache(), [[1]], **options)


NOT_OF_A_MODEL = [
    (
        lambda: decode_step(model(), new_cache(2), jnp.int32(3)),
        r"token must be [batch] or [batch, T] with batch 2, got shape ()",
    ),
    (lambda: decode_step(model(), new_cache(2), [1, 2, 3]), "with batch 2, got shape (3,)"),
    (lambda: decode_step(model(), new_cache(), jnp.zeros((1, 0), int)), "got shape (1, 0)"),
    (lambda: decode_step(new_cache(), model(), [1]), "a Llama of load_llama, got Cache"),
    (lambda: prefill(model(), one_layer(), [[1]]), "of kvq.init_cache, got LayerCache; its plan"),
    (lambda: score(model(), one_layer(), [[1]]), "of kvq.init_cache, got LayerCache; its plan"),
    (lambda: generated(one_layer()), "of kvq.init_cache, got LayerCache; its plan"),
    (
        lambda: generate_drafted(model(), one_layer(), [[1]], drafts=2),
        "of kvq.init_cache, got LayerCache; its plan",
    ),
    (lambda: prefill(FlatLlama(model()), new_cache(), [[1]]), "a Llama of load_llama, got Flat"),
    (lambda: generated(max_new_tokens=0), "max_new_tokens=0 must be an integer of at least 1"),
    (lambda: generated(key=3), "key must be one key, such as jax.random.key(0), got int"),
    (
        lambda: generated(key=jax.random.split(jax.random.key(0))),
        "key must be one key, such as jax.random.key(0), got an array [2]",
    ),
    (lambda: generated(sampling={}), "sampling must be a kvq_models.Sampling, got dict"),
    (lambda: generated(sampling=Sampling("1")), "temperature='1' must be a number"),
    (lambda: generated(sampling=Sampling(1, top_k=1.5)), "top_k=1.5 must be an integer"),
    (lambda: generated(sampling=Sampling(1, top_p=None)), "top_p=None must be a number"),
]


@pytest.mark.parametrize(("call", "message"), NOT_OF_A_MODEL)
def test_a_call_with_something_else_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_counts_may_be_integers_of_numpy():
    tokens = generate(model(), new_cache(), [[1, 2]], max_new_tokens=3).tokens
    three, two = np.int64(3), np.int64(2)
    assert (generate(model(), new_cache(), [[1, 2]], max_new_tokens=three).tokens == tokens).all()
    drafted = generate_drafted(model(), new_cache(), [[1, 2]], drafts=two, max_new_tokens=three)
    assert (drafted.tokens == tokens).all()


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


def test_the_lengths_of_a_step_are_checked():
    with pytest.raises(ValueError, match="lengths must be integers"):
        kvq.begin(new_cache(), 4, [1.5], prefill=True)


def test_a_number_of_new_tokens_is_an_integer():
    with pytest.raises(ValueError, match=r"max_new_tokens=2\.5 must be an integer of at least 1"):
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
    message = f"num_hidden_layers={layers} must be at most {MAX_LAYERS}"
    with pytest.raises(ValueError, match=message):
        load_llama(directory)
    code, _, error = run("memory", directory, "--cache", "kivi", "--context", 64)
    assert (code, error.count("\n")) == (2, 1), error
    assert message in error


def test_more_layers_than_the_files_hold_are_missed_before_they_are_made(tmp_path):
    directory = saved(tmp_path, num_hidden_layers=MAX_LAYERS)
    with pytest.raises(
        CheckpointError,
        match=r"lack tensor 'model.layers.1.self_attn.q_proj.weight' and more: they hold 1 layers",
    ):
        load_llama(directory)
    config = read_config(directory)
    assert len(parameter_bytes(kvq.cache.layout("kivi", config, 1, 32))) == MAX_LAYERS


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
    with pytest.raises(CheckpointError, match="model_max_length='x', which is not a number"):
        open_checkpoint(tmp_path).tokenizer()


def test_traced_tokens_keep_their_shape_and_are_checked_for_their_dtype():
    cache = new_cache()
    logits, _ = jax.eval_shape(
        lambda c, t: prefill(model(), c, t, logits="all"), cache, jnp.zeros((1, 5), jnp.int32)
    )
    assert logits.shape == (1, 5, 96)
    with pytest.raises(ValueError, match="tokens must be integers, got float32"):
        jax.eval_shape(lambda c, t: prefill(model(), c, t), cache, jnp.zeros((1, 5), jnp.float32))


@pytest.mark.parametrize(
    "fields",
    [{"num_attention_heads": 8, "head_dim": 16}, {"num_key_value_heads": 4}, {"head_dim": 32}],
)
def test_a_cache_of_other_heads_is_refused_by_field(fields):
    config, (name, value) = tiny_config(num_hidden_layers=1, **fields), next(iter(fields.items()))
    other = kvq.init_cache("dense", config, 1, 32, "float32")
    message = (
        f"^the cache was made for another model: it has {name}={value} and not"
        f" {getattr(model().config, name)}"
    )
    for step in (lambda: prefill(model(), other, [[1]]), lambda: score(model(), other, [[1]])):
        with pytest.raises(ValueError, match=message):
            step()
    with pytest.raises(ValueError, match=message):
        jax.jit(decode_step)(model(), other, jnp.asarray([1]))


def test_prepare_is_the_identity_for_methods_without_parameters_and_refuses_a_calibration():
    assert prepare(model(), "kivi") is model()
    with pytest.raises(ValueError, match="takes no calibration"):
        prepare(model(), "kivi", calibration="file.safetensors")
    with pytest.raises(ValueError, match="divisors"):
        prepare(model(), "kivi:group_size=24,block=24")
