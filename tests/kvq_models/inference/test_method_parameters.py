"""Parameters and caches that do not belong together are refused. Matching ones are used without
another trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, prefill, prepare, score
from kvq_models.llama.model import Llama
from kvq_tools.evaluation.forward import hidden_states
from tests.exhaustive import some
from tests.kvq_models import calibration_runs
from tests.kvq_models.checkpoints import model, random_tokens, row_errors

LENGTH = 24
CL = "xquant_cl:base_layer=0,bits=8,block=8,latent=false"
KVQUANT = "kvquant:bits=2,outliers=0.1,block=8"
SERVED = [
    (KVQUANT, f"{KVQUANT},sink=4,recent=8"),
    (KVQUANT, f"{KVQUANT},qnorm=true"),
    (KVQUANT, "kivi:bits=4,block=8"),  # which takes none
    ("xquant:bits=8,block=8", "xquant:bits=4,block=16,skip_layers=1"),
    ("int8:subtract_bias=true", "int8"),
]


def empty(spec: str) -> kvq.cache.Cache:
    return kvq.init_cache(spec, model().config, 1, LENGTH + 8, "float32")


def prepared(spec: str, work, of: str | None = None) -> Llama:
    """Return the model prepared for a spec, with the calibration of the spec `of`."""
    calibration = calibration_runs.run(work, of or spec) if spec.startswith("kvquant") else None
    return prepare(
        model("qwen2") if "subtract_bias" in (of or spec) else model(), spec, calibration
    )


@pytest.mark.parametrize(
    ("made_for", "used_with", "message"),
    [
        (
            KVQUANT,
            KVQUANT.replace("bits=2", "bits=4"),
            "keys of layer 0 were made for 'kvquant:bits=2,",
        ),
        (
            KVQUANT,
            f"{KVQUANT},datatype=nf",
            "needs those for 'kvquant:bits=2,outliers=0.1,datatype=nf,",
        ),
        (f"{CL},reading=unit_norm", CL, "made for 'xquant_cl:latent=false,reading=unit_norm'"),
        ("xquant:bits=8,skip_layers=0,block=8", "xquant:bits=8,block=8", "made for 'no method'"),
    ],
)
def test_parameters_made_for_other_options_are_refused_by_name(
    made_for: str, used_with: str, message: str, work
):
    llama, tokens = prepared(made_for, work), random_tokens((1, LENGTH))
    lengths = jnp.full((1,), LENGTH, jnp.int32)
    for use in (
        lambda: prefill(llama, empty(used_with), tokens),
        lambda: score(llama, empty(used_with), tokens),
        lambda: decode_step(llama, empty(used_with), tokens[:, 0]),
        lambda: hidden_states(llama, tokens, lengths, kvq.parse(used_with)),
    ):
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
            use()
        assert message in str(error.value), str(error.value)
        assert str(kvq.parse(used_with)) in str(error.value)


@pytest.mark.parametrize(("made_for", "used_with"), some(SERVED, SERVED[1:3]))
def test_parameters_serve_every_cache_that_needs_the_same_ones_or_none(
    made_for: str, used_with: str, work
):
    llama, tokens = prepared(made_for, work), random_tokens((1, LENGTH))
    own = prepared(used_with, work, of=made_for)
    prompt = [prefill(m, empty(used_with), tokens)[1] for m in (llama, own)]
    found, expected = (
        decode_step(m, cache, tokens[:, 0])[0]
        for m, cache in zip((llama, own), prompt, strict=True)
    )
    assert row_errors(found, expected).max() <= 1e-5
    other = decode_step(own, prompt[1], tokens[:, 1])[0]
    assert row_errors(other, expected).max() > 1e-3, "the logits of another token would pass"
    exact = hidden_states(llama, tokens, jnp.full((1,), LENGTH, jnp.int32))
    assert np.isfinite(np.asarray(exact)).all(), "a model with parameters runs without a cache"


def test_a_model_prepared_twice_is_traced_once():
    traces, spec = [], "xquant:bits=8,block=8"

    @jax.jit
    def step(llama, cache, token):
        traces.append(cache.spec)
        return decode_step(llama, cache, token)[0]

    token = jnp.zeros(1, jnp.int32)
    first, second = (step(prepare(model(), spec), empty(spec), token) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(traces) == 1
    copied = jax.tree.map(jnp.copy, prepare(model(), spec))
    step(copied, empty(spec), token)
    assert len(traces) == 1, "a copy of the model lost what its parameters were made for"
    with pytest.raises(ValueError, match="were made for 'xquant:latent"):
        step(copied, empty(f"{CL},reading=unit_norm"), token)
