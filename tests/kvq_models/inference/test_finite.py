"""Meaningless values are reported: weights and logits that are not finite, rows beyond the cache's
dtype, a consumed cache."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.overflow import Overflow
from kvq_models import generate, load_llama, save_llama
from kvq_models.inference import checked_input
from kvq_models.inference.engine.engine import Engine
from kvq_models.inference.engine.requests import Ended, Request
from kvq_models.llama.stored_tensor import CheckpointError
from tests.kvq_models.checkpoints import model, random_llama, tiny_config


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    llama = random_llama(tiny_config(num_hidden_layers=1))
    save_llama(llama, tmp_path)
    load_llama(tmp_path)
    kernel = llama.layers[0].v_proj.kernel
    kernel[...] = kernel[...].at[0, 0].set(1e6)
    save_llama(llama, tmp_path)
    load_llama(tmp_path, dtype="bfloat16")
    with pytest.raises(
        CheckpointError,
        match=(
            r"tensor 'model.layers.0.self_attn.v_proj.weight' holds nan, or values beyond float16"
        ),
    ):
        load_llama(tmp_path, dtype="float16")
    kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
    save_llama(llama, tmp_path)
    with pytest.raises(CheckpointError, match=r"v_proj\.weight' holds nan"):
        load_llama(tmp_path, dtype="float32")


def test_rows_beyond_the_caches_dtype_are_told_and_named():
    """The embedding of one token is huge, so that only the row with this token exceeds float16."""
    llama = random_llama(tiny_config(num_hidden_layers=1))
    kernel = llama.layers[0].v_proj.kernel
    kernel[...] = kernel[...] * 1e7
    llama.embed[...] = llama.embed[...].at[7].set(0.0)
    cache = kvq.init_cache("dense", llama.config, 2, 32, "float16")
    out = generate(llama, cache, [[7, 7, 7], [1, 2, 3]], max_new_tokens=1)
    assert np.asarray(out.finite).tolist() == [True, False]
    assert Overflow(1, 0, "v") in kvq.size.overflowed(out.cache)
    exact = generate(
        llama,
        kvq.init_cache("dense", llama.config, 2, 32),
        [[7, 7, 7], [1, 2, 3]],
        max_new_tokens=1,
    )
    assert np.asarray(exact.finite).all(), "float32 holds these rows"
    assert not kvq.size.overflowed(exact.cache)


def test_a_consumed_cache_says_where_it_went(tmp_path):
    llama = model(num_hidden_layers=1)
    cache = kvq.init_cache("dense", llama.config, 1, 32)
    taken = jax.jit(
        lambda c: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), c), donate_argnums=0
    )(cache)
    uses = {
        "checked_tokens": lambda c: checked_input.checked_tokens(llama, c, [[1]], None),
        "begin": lambda c: kvq.begin(c, 1, prefill=False),
        "trim": lambda c: kvq.rows.trim(c, [1]),
        "select_rows": lambda c: kvq.rows.select(c, [0]),
        "merge_rows": lambda c: kvq.rows.merge(taken, c),
        "save_cache": lambda c: kvq.files.save(c, tmp_path / "f.safetensors"),
        "fingerprint": kvq.files.fingerprint,
        "pickle": pickle.dumps,
        "seal": kvq.files.seal,
        "overflowed": kvq.size.overflowed,
        "outlier_totals": kvq.size.outlier_totals,
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match="consumed by a call that took it over") as refused:
            use(cache)
        assert "\n" not in str(refused.value), name
        use(taken)


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("scored", [False, True])
def test_no_prompt_of_numbers_that_are_not_finite_is_told_as_read(new: int, scored: bool):
    llama = random_llama(tiny_config(num_hidden_layers=1))
    llama.layers[0].v_proj.kernel[...] = llama.layers[0].v_proj.kernel[...] * jnp.inf
    engine = Engine(llama, "dense", slots=1, capacity=32, widths=(16,))
    ticket = engine.submit(Request((1, 2, 3), new, prompt_logprobs=scored))
    assert engine.advance() == [Ended(ticket, "not-finite")]
    assert engine.idle
