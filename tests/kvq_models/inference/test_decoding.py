"""prefill, decode_step and score through a cache equal the exact model, and bad input is refused
before any work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention.reference import decode_rows
from kvq_models import decode_step, forward, prefill, right_padded, score
from pallas_kernels.launch import Launch
from tests.compile_options import USUAL_COMPILE
from tests.exhaustive import some
from tests.kvq_models.checkpoints import model, random_tokens, row_errors

CAPACITY = 96
LENGTH = 72
# the same for many tests, which share programs
KIVI, INNERQ = ("kivi:bits=4,recent=8,block=8", "innerq:bits=3,sink=4,recent=8,block=8")
SPECS = ("dense", KIVI, f"{KIVI},pre_rope=true", INNERQ)
EIGHT_BITS = "k=kivi:bits=8,pre_rope=true+v=innerq:bits=8+cache:recent=8,block=8,sink=2"
step = jax.jit(decode_step, donate_argnames="cache")
xla_step = jax.jit(functools.partial(decode_step, implementation="xla"), donate_argnames="cache")


def new_cache(spec, batch=2, capacity=CAPACITY):
    return kvq.init_cache(spec, model().config, batch, capacity, "float32")


def logprobs(logits):
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def decoded(spec, tokens, prompt, step=step):
    """Logits [B, T - prompt, V] of tokens from `prompt` on, one step at a time."""
    _, cache = prefill(model(), new_cache(spec, tokens.shape[0]), tokens[:, :prompt])
    found = []
    for t in range(prompt, tokens.shape[1]):
        logits, cache = step(model(), cache, tokens[:, t])
        found.append(np.asarray(logits))
    return np.stack(found, axis=1), cache


@pytest.mark.parametrize("spec", some(SPECS, SPECS[2:]))
def test_prefill_logits_equal_the_exact_model(spec):
    tokens = random_tokens((2, LENGTH))
    logits, cache = prefill(model(), new_cache(spec), tokens, logits="all")
    assert row_errors(logits, forward(model(), tokens)).max() < 1e-5, spec
    assert np.asarray(cache.lengths).tolist() == [LENGTH, LENGTH]
    assert row_errors(logits, forward(model(), tokens.at[0, 0].add(1) % 96)).max() > 1e-3, (
        "another first token must change the logits"
    )


def test_last_logits_are_those_of_each_rows_last_token():
    tokens = random_tokens((2, 40))
    lengths = [40, 17]
    every, _ = prefill(model(), new_cache(INNERQ), tokens, lengths, logits="all")
    last, cache = prefill(model(), new_cache(INNERQ), tokens, lengths)
    for row, length in enumerate(lengths):
        assert row_errors(last[row], every[row, length - 1]).max() < 1e-5, f"row {row}"
        assert row_errors(last[row], every[row, length - 2]).max() > 1e-3, (
            f"row {row}: the token before must differ"
        )
    assert np.asarray(cache.lengths).tolist() == lengths


def test_eight_bit_cache_with_keys_before_rope_is_close_to_exact():
    """A rotation by the wrong position, or another RoPE than the model's, would show at any bit
    width."""
    tokens = random_tokens((2, LENGTH))
    exact = np.asarray(forward(model(), tokens))[:, 40:]
    errors = row_errors(decoded(EIGHT_BITS, tokens, 40)[0], exact)
    assert 1e-6 < errors.max() < 2e-2, "quantized, and close"


@pytest.mark.parametrize("spec", some(SPECS, SPECS[3:]))
def test_several_tokens_in_a_step_equal_single_steps(spec):
    if spec != "dense":
        spec += (  # a float16 scale may differ by 2^-11 of itself between two compiled functions
            ",scale_dtype=float32"
        )
    tokens = random_tokens((2, LENGTH))
    # CPU kernels round differently for several tokens: a key on a tie gets another code, and logits
    # move by 1e-3 (test_native_attention.py)
    single, cache = decoded(spec, tokens, 40, xla_step)
    _, other = prefill(model(), new_cache(spec), tokens[:, :40])
    several, other = xla_step(model(), other, tokens[:, 40:])
    assert row_errors(several, single).max() < 1e-5, spec
    assert cache.lengths.tolist() == other.lengths.tolist()
    for i, (one, many) in enumerate(zip(cache.layers, other.layers, strict=True)):
        for a, b in zip(
            *(decode_rows(cache.plans[i], (), state, cache.lengths) for state in (one, many)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=f"{spec}, layer {i}")


@pytest.mark.parametrize("spec", some(SPECS, SPECS[3:]))
def test_score_equals_a_loop_over_decode_step(spec):
    tokens = random_tokens((2, LENGTH))
    logits, _ = decoded(spec, tokens, 20)
    want = np.take_along_axis(logprobs(logits)[:, :-1], np.asarray(tokens)[:, 21:, None], axis=-1)[
        ..., 0
    ]
    _, cache = prefill(model(), new_cache(spec), tokens[:, :20])
    found, cache = score(model(), cache, tokens[:, 20:], [LENGTH - 20, 31])
    assert (np.asarray(found)[:, 0] == 0).all()
    # the sums of a chunk round differently from a step's (1e-6), which can change a stored float16
    # by a unit in its last place: one such zero point of 350 moves a score by 1.1e-4
    np.testing.assert_allclose(found[0, 1:], want[0], atol=5e-4, err_msg=spec)
    np.testing.assert_allclose(found[1, 1:31], want[1, :30], atol=5e-4, err_msg=spec)
    assert (np.asarray(found)[1, 31:] == 0).all(), "padding has no score"
    assert np.asarray(cache.lengths).tolist() == [LENGTH, 51]
    assert np.abs(np.asarray(found)[0, 2:] - want[0, :-1]).max() > 1e-2, (
        "scores shifted by one token must differ"
    )


def test_a_ragged_batch_decodes_each_row_as_alone():
    tokens = np.asarray(random_tokens((2, LENGTH)))
    lengths = [50, 23]
    padded, given = right_padded([tokens[b, :n].tolist() for b, n in enumerate(lengths)], pad=7)
    # fp32 scales: two programs round keys apart (1e-6), which can turn a float16 scale by a unit in
    # its last place (4e-5 in the logits)
    spec = f"{INNERQ},scale_dtype=float32"
    together, cache = prefill(model(), new_cache(spec), padded, given)
    together = [np.asarray(together)]
    for t in range(10):
        logits, cache = step(
            model(), cache, jnp.asarray([tokens[b, n + t] for b, n in enumerate(lengths)])
        )
        together.append(np.asarray(logits))
    for b, n in enumerate(lengths):
        logits, cache = prefill(model(), new_cache(spec, 1), tokens[b : b + 1, :n])
        for t in range(10):
            assert row_errors(together[t][b], logits[0]).max() < 1e-5, f"row {b}, step {t}"
            assert row_errors(together[t][1 - b], logits[0]).max() > 1e-2, (
                "another row's logits must differ"
            )
            logits, cache = step(model(), cache, jnp.asarray(tokens[b : b + 1, n + t]))


def test_inactive_rows_freeze():
    _, cache = prefill(model(), new_cache(INNERQ), random_tokens((2, 60)))
    before = jax.tree.map(np.array, cache)
    logits, after = step(model(), cache, jnp.asarray([1, 2]), jnp.asarray([True, False]))
    assert np.isnan(logits[1]).all()
    assert np.asarray(after.lengths).tolist() == [61, 60]
    for a, b in zip(jax.tree.leaves(before.layers), jax.tree.leaves(after.layers), strict=True):
        assert jnp.array_equal(a[1], b[1]), "the inactive row was written"


@pytest.mark.parametrize("spec", ["kivi:bits=4"])
def test_a_decode_step_needs_little_memory_beside_the_cache(spec):
    """Temporary memory is far below one layer's cache, in bfloat16 too, and the cache is updated in
    place."""
    # float32: a CPU would widen bfloat16 weights, which are not measured here
    llama = model(hidden_size=256, num_key_value_heads=2, head_dim=64)
    cache = kvq.cache.layout(spec, llama.config, 1, 131072, "bfloat16")
    lowered = step.lower(llama, cache, jax.ShapeDtypeStruct((1,), jnp.int32))
    compiled = lowered.compile(USUAL_COMPILE).memory_analysis()
    layer = kvq.size.nbytes(cache.layers[0])
    assert compiled.temp_size_in_bytes < layer / 10, (
        f"{spec}: temp {compiled.temp_size_in_bytes} of {layer} bytes a layer"
    )
    assert compiled.alias_size_in_bytes >= kvq.size.nbytes(cache.layers), (
        f"{spec}: the cache was copied"
    )


def test_a_step_of_one_sequence_for_a_gpu_gives_the_logits_of_xla():
    """On a GPU its row goes through each layer twice. Kernels are interpreted."""
    llama = model(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=2,
    )
    cache, tokens = (
        kvq.init_cache("kivi:bits=4", llama.config, 1, 256, "float32"),
        random_tokens((1, 200)),
    )
    _, cache = prefill(llama, cache, tokens, implementation="xla")
    kernels, without = (
        jax.jit(functools.partial(decode_step, implementation=name))
        for name in (Launch(interpret=True), "xla")
    )
    (own, after), (xla, expected) = (
        kernels(llama, cache, tokens[:, 0]),
        without(llama, cache, tokens[:, 0]),
    )
    assert own.shape == xla.shape
    assert row_errors(own, xla).max() < 3e-3, (
        "more than the half precision of the kernels' products"
    )
    assert row_errors(kernels(llama, cache, tokens[:, 0] + 1)[0], xla).max() > 3e-2, (
        "another token passes"
    )
    assert jax.tree.structure(after) == jax.tree.structure(expected)
    shapes, wanted = ([leaf.shape for leaf in jax.tree.leaves(c)] for c in (after, expected))
    assert shapes == wanted
