"""Each of the three modes equals its definition, written out by hand. The exact cache gives the
exact model, a coarse one does not."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import decode_step, forward, prefill
from kvq_models.llama.model import causal_attention
from kvq_models.llama.rope import ropes_for
from kvq_tools import evaluate, evaluate_caches, measure
from kvq_tools.evaluation import measure_rows, program_memory
from kvq_tools.evaluation.compare import compare
from kvq_tools.evaluation.forward import QUERY_CHUNK, chunked_attention
from kvq_tools.evaluation.windows import windows
from tests.kvq_models.checkpoints import random_llama, tiny_config

WINDOW, STRIDE, CHUNK, TOKENS = 48, 20, 20, 150  # the last window is shorter, the last chunk too
COARSE = (  # fp32: a last bit of float16 would show
    "kivi:bits=4@0/2,scale_dtype=float32,sink=1,recent=5,block=8"
)
CUT = windows(TOKENS, WINDOW, STRIDE)
MODES = ("decode", "chunked", "fake")


class Scene(NamedTuple):
    llama: object
    ids: np.ndarray
    found: dict  # mode -> (dense, coarse)


@pytest.fixture(scope="module")
def scene():
    llama = random_llama(tiny_config(num_hidden_layers=2, head_dim=16))
    ids = np.random.default_rng(0).integers(0, llama.config.vocab_size, TOKENS)
    sizes = {"window": WINDOW, "stride": STRIDE, "batch": 3, "chunk": CHUNK}
    caches = [(llama, "dense"), (llama, COARSE)]
    return Scene(
        llama, ids, {mode: evaluate_caches(caches, ids, mode=mode, **sizes) for mode in MODES}
    )


def nats_of(logits, following):
    """-log p of the following tokens from logits [T, V]."""
    logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return -np.asarray(logprobs)[np.arange(len(following)), following]


def by_hand(ids, logits_of):
    """Return -log p of the scored tokens. logits_of(window tokens) gives logits [T - 1, V]."""
    parts = []
    for begin, end, first in CUT:
        row = ids[begin:end]
        parts.append(nats_of(logits_of(row), row[1:])[first - 1 :])
    return np.concatenate(parts)


def assert_close(found, wanted, what):
    error = np.abs(found - wanted)
    worst = int(error.argmax())
    assert error.max() < 1e-4, (
        f"{what}: token {worst} has {found[worst]} nats, by hand {wanted[worst]}"
    )
    assert np.abs(found - np.roll(wanted, 1)).max() > 0.1, (
        f"{what}: the comparison does not see a shift by one token"
    )


def test_the_reference_is_the_model_without_a_cache(scene):
    exact = jax.jit(forward)
    wanted = by_hand(scene.ids, lambda row: exact(scene.llama, jnp.asarray(row[None]))[0, :-1])
    for mode, results in scene.found.items():
        for result in results:
            assert_close(result.exact_nats, wanted, f"exact, {mode}")


def test_windows_of_a_text_with_the_token_that_opens_it_begin_with_that_token(scene):
    bos = int(scene.ids[0])
    llama = random_llama(tiny_config(num_hidden_layers=2, head_dim=16, bos_token_id=bos))
    sizes = {"window": WINDOW, "stride": STRIDE, "batch": 3, "chunk": CHUNK, "mode": "chunked"}
    exact = jax.jit(forward)

    def logits(row):
        return exact(llama, jnp.asarray(row[None]).at[0, 0].set(bos))[0, :-1]

    wanted = by_hand(scene.ids, logits)
    (result,) = evaluate_caches([(llama, "dense")], scene.ids, **sizes)
    assert_close(result.exact_nats, wanted, "opened windows")
    later = scene.found["chunked"][0].exact_nats
    first = CUT[0].end - CUT[0].first
    np.testing.assert_allclose(later[:first], wanted[:first], atol=1e-4)
    assert np.abs(later - wanted)[first:].max() > 1e-2, "windows without it would pass"


@pytest.mark.parametrize("cache", ["dense", COARSE])
def test_decode_is_a_loop_over_decode_step(scene, cache):
    step = jax.jit(decode_step)

    def loop(row):
        state = kvq.init_cache(cache, scene.llama.config, 1, WINDOW, "float32")
        logits = []
        for token in row[:-1]:
            found, state = step(scene.llama, state, jnp.asarray([token], jnp.int32))
            logits.append(found[0])
        return jnp.stack(logits)

    result = scene.found["decode"][cache == COARSE]
    assert_close(result.nats, by_hand(scene.ids, loop), f"decode, {cache}")


def test_chunked_is_a_loop_over_prefill(scene):
    def loop(row):
        state = kvq.init_cache(COARSE, scene.llama.config, 1, WINDOW, "float32")
        logits = []
        for at in range(0, len(row), CHUNK):
            part = row[at : at + CHUNK]
            padded = np.pad(part, (0, CHUNK - len(part)))
            found, state = prefill(scene.llama, state, padded[None], [len(part)], logits="all")
            logits.append(found[0, : len(part)])
        return jnp.concatenate(logits)[:-1]

    assert_close(scene.found["chunked"][1].nats, by_hand(scene.ids, loop), "chunked")


def test_fake_is_one_forward_pass_over_round_tripped_keys_and_values(scene):
    llama, spec = scene.llama, kvq.parse(COARSE)

    @jax.jit
    def one(row):
        positions, valid = jnp.arange(row.size)[None], jnp.ones((1, row.size), bool)
        rope = ropes_for(llama.config, WINDOW)
        hidden, carry = llama.embed_tokens(row[None]), ()
        for number, layer in enumerate(llama.layers):
            inputs = layer.attention_inputs(hidden, positions, valid, rope)
            k, v, carry = kvq.cache.roundtrip_layer(spec, inputs, (), number, carry)
            hidden = layer.finish(hidden, causal_attention(inputs.q_rot, k, v, valid))
        return llama.logits(hidden)[0, :-1]

    assert len(scene.ids[CUT[-1].begin :]) % spec.block, "the last window is to end inside a block"
    assert_close(
        scene.found["fake"][1].nats, by_hand(scene.ids, lambda row: one(jnp.asarray(row))), "fake"
    )


def test_all_modes_give_the_exact_model_for_the_dense_cache(scene):
    for mode in MODES:
        dense = scene.found[mode][0]
        assert_close(dense.nats, dense.exact_nats, mode)
        assert 0 <= dense.mean_kl < 1e-6, f"{mode}: KL {dense.mean_kl}"
        assert dense.kl.min() >= -1e-6
        assert dense.agreement == 1, f"{mode}: agreement {dense.agreement}"
        assert dense.flips.size == 0


def test_a_coarse_cache_is_further_away_in_every_mode_and_furthest_if_no_token_is_exact(scene):
    kl = {mode: scene.found[mode][1].mean_kl for mode in MODES}
    assert all(kl[mode] > 1e-3 for mode in MODES), kl
    assert kl["chunked"] < kl["decode"] < kl["fake"], (
        f"fewer of the keys and values that are read are exact: {kl}"
    )
    for mode in MODES:
        dense, coarse = scene.found[mode]
        assert coarse.flips.size == round((1 - coarse.agreement) * coarse.tokens) > 0
        assert set(coarse.flips) < set(dense.index)


def test_results_do_not_depend_on_the_batch_or_the_step(scene):
    coarse = scene.found["decode"][1]
    other = evaluate(
        scene.llama, COARSE, scene.ids, window=WINDOW, stride=STRIDE, batch=100, step=8
    )
    assert_close(other.nats, coarse.nats, "all windows together, 8 tokens a step")
    assert (other.index == coarse.index).all()


@pytest.mark.parametrize(("count", "dropped"), [(10, False), (60_000, True)])
def test_programs_that_are_too_many_are_forgotten_and_compiled_again(
    scene, count, dropped, monkeypatch, tmp_path
):
    """Without this, a process that measures many calibrated caches crashes inside LLVM."""
    (tmp_path / "max_map_count").write_text("65530")
    monkeypatch.setattr(program_memory, "LIMIT", tmp_path / "max_map_count")
    monkeypatch.setattr(program_memory, "mappings", lambda: count)
    cleared = []
    clear = jax.clear_caches
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(clear()))
    coarse = scene.found["decode"][1]
    again = evaluate(scene.llama, COARSE, scene.ids, window=WINDOW, stride=STRIDE, batch=3)
    assert bool(cleared) == dropped
    assert_close(again.nats, coarse.nats, "after programs were dropped")


def test_programs_are_counted_after_each_cache(scene, monkeypatch):
    counts = []
    rows = jnp.asarray(scene.ids.reshape(2, 75), jnp.int32)
    for specs in ((COARSE,), (COARSE, "dense", COARSE)):
        calls = []
        monkeypatch.setattr(program_memory, "drop_if_many", lambda calls=calls: calls.append(1))
        measure_rows([(scene.llama, spec) for spec in specs], rows, prompt=20)
        counts.append(len(calls) - 1)  # one prompt, which all caches read together
    assert counts[0] > 0
    assert counts[1] == 3 * counts[0]


def test_a_prompt_and_the_token_predicted_before_a_cache_is_read_are_not_scored(scene):
    plain = scene.found["decode"][1]
    prompted = evaluate(
        scene.llama, COARSE, scene.ids, window=WINDOW, stride=STRIDE, batch=3, prompt=28
    )
    after = [window.begin + 28 for window in CUT]
    scored = [token for token in range(29, TOKENS) if token not in after]
    assert prompted.index.tolist() == scored
    assert_close(
        prompted.exact_nats, plain.exact_nats[np.array(scored) - 1], "exact after a prompt"
    )
    assert prompted.kl.min() > 1e-6, "every scored token reads the prompt from the cache"


def test_rows_are_measured_after_a_prompt_that_is_not_scored(scene):
    rows = jnp.asarray(scene.ids.reshape(2, 75), jnp.int32)  # no multiple of a step
    found = measure(scene.llama, "dense", rows, prompt=20)
    logprobs = jax.nn.log_softmax(forward(scene.llama, rows))[:, 20:-1]
    nats = -jnp.take_along_axis(logprobs, rows[:, 21:, None], axis=-1)
    assert found.tokens == 2 * (75 - 21)
    assert found.nats == pytest.approx(float(jnp.mean(nats)), rel=1e-4)
    assert found.perplexity == pytest.approx(float(jnp.exp(jnp.mean(nats))), rel=1e-4)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.nats != pytest.approx(measure(scene.llama, "dense", rows).nats, rel=1e-4)
    with pytest.raises(ValueError, match="leaves fewer than two of 75"):
        measure(scene.llama, "dense", rows, prompt=74)


# --- its parts


def test_kl_is_that_of_float64_and_zero_for_logits_that_differ_by_a_constant():
    rng = np.random.default_rng(0)
    exact = rng.normal(0, 8, (1, 5, 200)).astype(np.float32)
    logits = exact + rng.normal(0, [[[0], [1e-4], [1e-2], [1], [40]]], exact.shape).astype(
        np.float32
    )
    p, q = (
        np.exp(a - a.max(-1, keepdims=True))
        for a in (exact.astype(np.float64), logits.astype(np.float64))
    )
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    wanted = (p * np.log(p / q)).sum(-1)
    following = jnp.zeros((1, 5), jnp.int32)
    found = np.asarray(compare(jnp.asarray(logits), jnp.asarray(exact), following).kl)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-10)
    assert wanted[0, 4] > 1e7 * wanted[0, 1] > 0, "the case spans many magnitudes"
    moved = np.asarray(compare(jnp.asarray(exact + 30), jnp.asarray(exact), following).kl)
    assert (np.abs(moved) < 1e-10).all(), moved


def test_attention_by_chunks_of_queries_is_that_of_the_model():
    length = 2 * QUERY_CHUNK + 3
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, heads, length, 8)), jnp.float32) for heads in (4, 2, 2)
    )
    wanted = causal_attention(q, k, v, jnp.ones((1, length), bool))
    found = jax.jit(chunked_attention)(q, k, v)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(found) - np.roll(wanted, 1, axis=2)).max() > 0.1


@pytest.mark.usefixtures("types_unchecked")
def test_rows_are_refused_as_a_text_is():
    llama, rows = random_llama(tiny_config(num_hidden_layers=1)), np.ones((2, 8), np.int32)
    for choices, message in (
        ({"mode": "decoded"}, "must be one of decode, chunked, fake"),
        ({"batch": 0}, "batch, chunk and step must be at least 1"),
        ({"step": 0}, "batch, chunk and step must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_rows([(llama, "int4")], rows, **choices)
    with pytest.raises(ValueError, match="at least one row"):
        measure_rows([(llama, "int4")], rows[:0])
