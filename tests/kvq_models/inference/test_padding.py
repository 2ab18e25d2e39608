"""Few programs serve all lengths, and a padded request gives the results of the request without
padding."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvq_jax as kvq
from kvq_jax.cache.cache import plans
from kvq_jax.cache.step import begin
from kvq_models import Sampling, generate, prefill, score
from kvq_models.inference.layers import run_layers
from kvq_models.inference.padding import bucket, padded
from kvq_models.inference.prompts import read_hidden, read_prompt
from tests.kvq_jax.layer_runs import beyond_rounding, live, parameters_of
from tests.kvq_models import checkpoints
from tests.kvq_models.checkpoints import random_llama, random_tokens, row_errors, tiny_config
from tests.methods_table import cases

CAPACITY = 50  # not the width of a program
compiled: list[str] = []
model = functools.partial(checkpoints.model, num_hidden_layers=1)


@pytest.fixture(scope="module", autouse=True)
def _listener() -> None:
    """Writes down every program that XLA compiles."""

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that holds the compilations of this context, once it is left."""
    before, found = len(compiled), []
    yield found
    found += compiled[before:]


def new_cache(spec: kvq.cache.CacheSpec | str = "dense", batch=1, capacity=CAPACITY, config=None):
    return kvq.init_cache(spec, config or model().config, batch, capacity, "float32")


def test_widths_are_powers_of_two_and_the_halves_between_them():
    widths = sorted({bucket(n) for n in range(1, 1025)})
    assert widths == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(n <= bucket(n) < max(17, 1.5 * n + 1) for n in range(1, 1025)), (
        "a width is below its tokens, or far above them"
    )


@pytest.mark.parametrize("name", ["score", "generate"])
def test_all_lengths_compile_a_program_for_each_width(name):
    """Without widths every length is a program."""
    rng = np.random.default_rng(0)

    def call(length, new):
        tokens = rng.integers(0, 96, (1, length))
        if name == "score":
            return score(model(), new_cache(), tokens)
        return generate(
            model(),
            new_cache(),
            tokens[:, : CAPACITY - new],
            max_new_tokens=new,
            sampling=Sampling(1.0),
        )

    lengths = range(1, CAPACITY + 1)
    widths = {min(bucket(n), CAPACITY) for n in lengths}
    for width in sorted(widths):  # the small programs that make arrays, too
        call(width, 1)
    with counted() as again:
        for n in lengths:
            call(n, int(rng.integers(1, 17)))
    assert len(widths) == 5, widths
    assert not again, f"{len(again)} programs more than one for each of {len(widths)} widths"
    with counted() as other:
        jax.jit(lambda x: x + len(widths))(jnp.arange(3))
    assert other, "compilations are not counted"


def test_logits_at_padding_are_nan_in_any_width():
    tokens = np.zeros((2, 60), np.int32)  # wider than the cache, as the lengths allow
    logits, _ = prefill(model(), new_cache(batch=2), tokens, [3, 20], logits="all")
    real = np.arange(60) < np.array([[3], [20]])
    assert (np.isfinite(np.asarray(logits)).all(axis=-1) == real).all()


@pytest.mark.parametrize("spec", ["kivi:recent=8,block=8", "innerq:sink=4,recent=8,block=8"])
def test_the_padding_that_a_caller_adds_changes_no_bit(spec):
    tokens, lengths = np.asarray(random_tokens((2, 30))), np.array([30, 11])
    runs = {}
    for width, content in ((30, 0), (31, 95), (200, 10**6)):
        given = np.full((2, width), content)
        given[:, :30] = np.where(np.arange(30) < lengths[:, None], tokens, content)
        runs[width] = jax.tree.map(np.asarray, prefill(model(), new_cache(spec, 2), given, lengths))
    for width, found in runs.items():
        for one, other in zip(jax.tree.leaves(runs[30]), jax.tree.leaves(found), strict=True):
            assert one.tobytes() == other.tobytes(), f"{spec}: padded to {width} tokens"
    other = jax.tree.map(np.asarray, prefill(model(), new_cache(spec, 2), tokens, [30, 12]))
    assert any(
        a.tobytes() != b.tobytes()
        for a, b in zip(jax.tree.leaves(runs[30]), jax.tree.leaves(other), strict=True)
    )


# steps by the native kernel and by XLA; prompts that the native kernel reads, and others
@cases(usual=("kivi2", "xquant_cl2"))
def test_padding_and_vacant_rows_are_zeros_after_the_last_layer(case):
    """Products of packed weights skip them."""
    config = tiny_config(hidden_size=128, intermediate_size=32, max_position_embeddings=128)
    llama, spec = random_llama(config), kvq.parse(case.spec)
    cache = new_cache(spec, 3, config=config)
    parameters = tuple(parameters_of(plan) for plan in plans(spec, cache.dims, CAPACITY, "float32"))
    llama.cache_parameters = nnx.data(parameters)
    tokens, lengths = random_tokens((3, 40)), jnp.array([40, 0, 23])
    hidden, cache = read_hidden(llama, cache, tokens, lengths)
    real = np.arange(40) < np.asarray(lengths)[:, None]
    np.testing.assert_array_equal(np.abs(hidden).max(axis=2) > 0, real, "a prompt")
    active = jnp.array([False, False, True])
    step = begin(cache, 1, active.astype(jnp.int32), prefill=False, parameters=parameters)
    hidden, _ = run_layers(llama, step, tokens[:, :1])
    np.testing.assert_array_equal(np.abs(hidden[:, 0]).max(axis=1) > 0, active, "a step")


@cases("innerq2", "squat2", "kvquant3_online", "xquant_cl2", usual=("innerq2", "xquant_cl2"))
def test_a_padded_prompt_leaves_the_cache_of_an_unpadded_one(case):
    """To rounding, for these are two programs."""
    llama = random_llama(
        tiny_config(
            hidden_size=128, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=128
        )
    )
    spec, length = kvq.parse(case.spec), 41
    cache = new_cache(spec, config=llama.config)
    assert cache.dims == kvq.CacheDims(1, 4, 2, 32, 128), (
        "the dimensions that these parameters are for"
    )
    llama.cache_parameters = nnx.data(
        tuple(parameters_of(plan) for plan in plans(spec, cache.dims, CAPACITY, "float32"))
    )
    tokens, lengths = random_tokens((1, length)), np.array([length], np.int32)
    want, exact = read_prompt(llama, cache, tokens, jnp.asarray(lengths))
    found, after = prefill(llama, new_cache(spec, config=llama.config), tokens)
    assert padded(np.asarray(tokens), lengths, CAPACITY).shape == (1, 48), "no padding to test"
    assert row_errors(found, want).max() < 1e-4, "logits"
    one, other = (live(exact.plans[0], c.layers[0], lengths) for c in (exact, after))
    assert not beyond_rounding(one, other)
    _, changed = prefill(llama, new_cache(spec, config=llama.config), tokens.at[0, 20].add(1) % 96)
    assert beyond_rounding(one, live(exact.plans[0], changed.layers[0], lengths)), (
        "another token goes unnoticed"
    )
