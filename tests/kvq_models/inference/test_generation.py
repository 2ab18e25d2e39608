"""generate and its stream give the same tokens as transformers, and the same tokens for the same
seed, alone or in a batch. Sampling keeps the right tokens."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_models import (
    Sampling,
    decode_step,
    generate,
    generate_stream,
    load_llama,
    prefill,
    right_padded,
)
from kvq_models.inference.sampling import sample
from tests.exhaustive import some
from tests.kvq_models.checkpoints import CASES, SIZES, build_checkpoint, model, random_tokens

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="transformers' models need torch (extra parity)",
)
NEW = 64


def new_cache(spec="dense", batch=2, config=None, capacity=128):
    return kvq.init_cache(spec, config or model().config, batch, capacity, "float32")


def greedy_with_transformers(torch_model, prompt, new):
    import torch

    out = torch_model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def assert_greedy_matches(torch_model, llama, prompts):
    tokens, lengths = right_padded(prompts)
    found = generate(
        llama, new_cache("dense", len(prompts), llama.config), tokens, lengths, max_new_tokens=NEW
    )
    for row, prompt in enumerate(prompts):
        want = greedy_with_transformers(torch_model, prompt, NEW)
        assert np.asarray(found.tokens[row]).tolist() == want, f"prompt of {len(prompt)} tokens"
    other = greedy_with_transformers(torch_model, prompts[0][:-1], NEW)
    assert np.asarray(found.tokens[0]).tolist() != other, "another prompt must give another text"


@needs_torch
@pytest.mark.parametrize("name", some(CASES, ("llama_llama3",)))
def test_64_greedy_tokens_equal_transformers(name, tmp_path):
    # prompt and new tokens stay inside the trained length, in which dynamic RoPE changes nothing
    longer = {"max_position_embeddings": 128}
    torch_model = build_checkpoint(
        tmp_path, dataclasses.replace(CASES[name], fields=CASES[name].fields | longer)
    )
    llama, tokenizer = load_llama(tmp_path, dtype="float32")
    assert tokenizer is None
    rng = np.random.default_rng(3)
    assert_greedy_matches(
        torch_model, llama, [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in (11, 5)]
    )


def test_generate_equals_a_loop_over_decode_step_and_returns_the_cache():
    tokens, lengths = random_tokens((2, 30)), jnp.asarray([30, 12])
    spec = "innerq:recent=8,block=8"
    found = generate(model(), new_cache(spec), tokens, lengths, max_new_tokens=20)
    logits, cache = prefill(model(), new_cache(spec), tokens, lengths)
    for t in range(20):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        assert jnp.array_equal(token, found.tokens[:, t]), f"step {t}"
        np.testing.assert_allclose(
            found.logprobs[:, t], jax.nn.log_softmax(logits)[jnp.arange(2), token], atol=1e-4
        )
        logits, cache = jax.jit(decode_step)(model(), cache, token)
    assert np.asarray(found.cache.lengths).tolist() == [50, 32]
    assert np.asarray(found.lengths).tolist() == [20, 20]


def test_rows_stop_at_the_end_of_sequence_and_freeze():
    tokens = random_tokens((2, 20))
    free = np.asarray(generate(model(), new_cache(), tokens, max_new_tokens=16).tokens)
    eos = int(free[0, 5])
    stop = [int(np.argmax(row == eos)) + 1 if eos in row else 16 for row in free]
    found = generate(model(), new_cache(), tokens, max_new_tokens=16, eos_ids=(eos, 95))
    assert np.asarray(found.lengths).tolist() == stop
    assert np.asarray(found.cache.lengths).tolist() == [20 + n for n in stop]
    for row, n in enumerate(stop):
        assert np.asarray(found.tokens)[row, :n].tolist() == free[row, :n].tolist()
        assert not np.asarray(found.tokens)[row, n:].any(), f"row {row} went on"


def test_a_seed_fixes_the_text_and_another_seed_changes_it():
    tokens, sampling = (
        random_tokens((2, 20)),
        Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01),
    )
    runs = [
        generate(
            model(),
            new_cache(),
            tokens,
            max_new_tokens=16,
            sampling=sampling,
            key=jax.random.key(s),
        ).tokens
        for s in (1, 1, 2)
    ]
    assert jnp.array_equal(runs[0], runs[1])
    assert not jnp.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=20)])
def test_a_stream_has_the_same_tokens_in_growing_pieces(sampling):
    options = dict(max_new_tokens=19, sampling=sampling, key=jax.random.key(4))
    tokens = random_tokens((2, 20))
    whole = generate(model(), new_cache("kivi:recent=8,block=8"), tokens, **options)
    pieces = [
        np.asarray(piece.tokens)
        for piece in generate_stream(model(), new_cache("kivi:recent=8,block=8"), tokens, **options)
    ]
    assert len(pieces) == 3
    assert (pieces[0][:, :8] == np.asarray(whole.tokens)[:, :8]).all()
    assert not pieces[0][:, 8:].any()
    assert (pieces[-1] == np.asarray(whole.tokens)).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"max_new_tokens": 109}, "but the cache's capacity is 128"),
        ({"sampling": Sampling(top_p=2)}, "top_p=2 must be in"),
        ({"lengths": np.array([20, 0]), "max_new_tokens": 9}, "row 1 has an empty prompt"),
    ],
)
def test_a_stream_refuses_what_generate_does_before_anything_is_asked_of_it(options, told):
    cache = new_cache()
    for write in (generate, generate_stream):
        with pytest.raises(ValueError, match=told):
            write(model(), cache, random_tokens((2, 20)), **options)
    cache.lengths.block_until_ready()  # it was not consumed


def test_samples_follow_the_filtered_distribution():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    draw = jax.jit(
        jax.vmap(
            lambda s: sample(logits, Sampling(temperature=1.0, top_k=2), jax.random.key(0), s)[0][0]
        )
    )
    counts = np.bincount(np.asarray(draw(jnp.arange(4000))), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.03)
