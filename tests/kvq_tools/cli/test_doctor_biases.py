"""The harm of a key bias in one RoPE pair, by method and pair, and the warnings of `kvq doctor`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models.llama.rope import rope_for
from kvq_tools.cli.doctor_warnings import known_problems
from tests.exhaustive import some
from tests.kvq_models.checkpoints import tiny_config

CONFIG = tiny_config(
    "qwen2", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=128
)
CAPACITY, BIAS, PAIRS = 256, 300.0, 64
KIVI, POLAR, ZIP = "k=kivi:bits=4+v=dense", "k=polarquant+v=dense", "zipcache:probes=8"


def biased(pair):
    return np.zeros(128, np.float32) if pair is None else BIAS * np.eye(128, dtype=np.float32)[pair]


def logits_error(spec, pair):
    """Return the standard deviation of the error of the logits of random keys with this bias."""
    rope = rope_for(CONFIG, CAPACITY)
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, CAPACITY, 128)) for i in range(2))
    positions = jnp.arange(CAPACITY, dtype=jnp.int32)[None]
    q, keys = (
        kvq.types.rotate(x, positions, rope) for x in (q, k + biased(pair)[None, None, None])
    )
    stored, _ = kvq.roundtrip(spec, keys, keys, q=q, layout="BNTH")
    return float(jnp.std(jnp.einsum("bnth,bksh->ts", q, stored - keys))) / np.sqrt(128)


def turning(spec, pair, capacity=CAPACITY):
    cache = kvq.cache.layout(spec, CONFIG, 1, capacity, "float32")
    return [w for w in known_problems(CONFIG, cache, [biased(pair)]) if "RoPE turns" in w]


USUAL = ["kivi:bits=4,rotate=true", "innerq:bits=4", "int4", "fp8", "fp8:scale=none", "nvfp4"]
OTHERS = ["gear:bits=4", "int8", "int4:rotate=true", "nf4", "mxfp4", "turboquant"]
BIASED = [KIVI, POLAR, *(f"k={keys}+v=dense" for keys in USUAL)]


@pytest.mark.parametrize(
    "spec", some([*BIASED, ZIP, *(f"k={keys}+v=dense" for keys in OTHERS)], BIASED)
)
def test_the_doctor_warns_of_the_biases_that_hurt_and_of_no_others(spec):
    """Pair 0 turns by a radian a token, the last one hardly: it hurts if channels share a scale, or
    are floats, and not if a channel or pair has its own."""
    plain = logits_error(spec, None)
    cache = kvq.cache.layout(spec, CONFIG, 1, CAPACITY, "float32")
    for pair in (None, 0, PAIRS // 4, PAIRS - 1):
        error = logits_error(spec, pair)
        warnings = [w for w in known_problems(CONFIG, cache, [biased(pair)]) if "bias" in w]
        assert bool(warnings) == (error > 2 * plain), (
            f"pair {pair}: error {error:.3f}, without bias {plain:.3f}, doctor says {warnings}"
        )


@pytest.mark.parametrize("spec", [KIVI, POLAR, ZIP])
def test_the_doctor_names_the_pair_that_turns(spec):
    for pair, turns in ((0, True), (PAIRS // 4, True), (PAIRS - 1, False)):
        warnings = turning(spec, pair)
        assert bool(warnings) is turns, f"pair {pair}: {warnings}"
        if turns:
            assert f"bias of pair {pair} (KV head 0) by" in warnings[0]
            assert ("subtract_bias=true" in warnings[0]) is (spec != ZIP), "it declines the option"


def test_the_doctor_names_the_step_of_floats():
    """A step is at most an eighth of the entry, with three mantissa bits."""
    cache = kvq.cache.layout("fp8", CONFIG, 1, CAPACITY, "float32")
    (warning,) = (w for w in known_problems(CONFIG, cache, [biased(0)]) if "mantissa" in w)
    assert "in steps of up to 37.5; add subtract_bias=true or skip_layers=0" in warning
    spared = kvq.cache.layout(
        "k=fp8+v=fp8+cache:subtract_bias=true", CONFIG, 1, CAPACITY, "float32"
    )
    assert not any("mantissa" in w for w in known_problems(CONFIG, spared, [biased(0)]))


@pytest.mark.parametrize(
    "spec", ["k=kivi:bits=4,pre_rope=true+v=dense", f"{KIVI}+cache:subtract_bias=true", "dense"]
)
def test_keys_that_do_not_turn_are_spared(spec):
    assert not turning(spec, 0)
