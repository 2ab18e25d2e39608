"""Training: the rows that a step reads, what synthetic documents hold, the loss, resuming, and what
the card measures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, forward
from kvq_models.llama.rope_config import RopeConfig
from laboratory.embedded_model import corpus, state, train
from laboratory.embedded_model.evaluate import greedy_text, passkey_recall, score_text
from laboratory.embedded_model.initialization import wire_induction
from laboratory.embedded_model.objective import training_logits, weighted_loss
from laboratory.embedded_model.synthetic import (
    ANSWER_WEIGHT,
    NEEDLE_FACT,
    NEEDLE_PROMPT,
    PASSKEY_FACT,
    PASSKEY_PROMPT,
    SyntheticRows,
)
from laboratory.embedded_model.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "green",
    "birds",
    "sing",
    "and",
    "stones",
]


def sentences(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(WORDS, 12)) + "." for _ in range(count))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        [
            *(sentences(200, seed) for seed in range(3)),
            *200 * [PASSKEY_FACT, PASSKEY_PROMPT, NEEDLE_FACT, NEEDLE_PROMPT],
        ],
        400,
    )


@pytest.fixture(scope="module")
def stream(tokenizer):
    return corpus.encode_documents(tokenizer, [sentences(150, seed) for seed in range(4)])


@pytest.fixture(scope="module")
def llama(tokenizer):
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Llama(config, rngs=nnx.Rngs(0))


def test_tokenizer_gives_every_text_back_and_every_digit_its_token(tokenizer):
    text = "Prices: 48213 \u2192 caf\u00e9\n\ttabs"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text, f"{encoding.tokens=}"
    assert encoding.tokens[0] == END_OF_TEXT, "an encoded text opens with END_OF_TEXT"
    assert [token for token in encoding.tokens if token.strip("\u0120").isdigit()] == list("48213")


def test_transformers_loads_the_saved_tokenizer(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 1024)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded("the quick 12").input_ids == tokenizer.encode("the quick 12").ids
    assert loaded.bos_token_id == loaded.eos_token_id == 0


def test_documents_are_split_at_the_end_of_text_line_and_held_out_by_content(tmp_path):
    documents = [f"document {number}\nwith a body" for number in range(300)]
    (tmp_path / "all.txt").write_text(
        "".join(f"{document}\n{END_OF_TEXT}\n" for document in documents)
    )
    assert corpus.read_documents(tmp_path) == documents
    kept, held_out = corpus.split_documents(documents, one_in=10)
    assert sorted(kept + held_out) == sorted(documents)
    assert 10 < len(held_out) < 60, f"{len(held_out)=} of 300 at one in 10"
    assert set(corpus.split_documents(documents[::-1], one_in=10)[1]) == set(held_out), (
        "the split must not depend on the order"
    )


@pytest.mark.parametrize(
    ("text", "problem"), [("256", "LENGTH:STEPS"), ("100:5", "divide"), ("x:5", "LENGTH:STEPS")]
)
def test_curriculum_errors_name_what_is_expected(text, problem):
    with pytest.raises(ValueError, match=problem):
        corpus.parse_curriculum(text)


def test_real_rows_walk_through_the_shuffled_stream_once(tokenizer):
    stream = np.arange(16 * corpus.WINDOW, dtype=np.uint16) % 60_000 + 1
    source = corpus.RowSource(
        stream,
        SyntheticRows(tokenizer, stream % 300),
        corpus.parse_curriculum("1024:3,2048:3"),
        4096,
        seed=0,
    )
    rows = [row for step in range(6) for row in source.batch(step).tokens]
    real = [row for row in rows if np.all(np.diff(row[1:]) == 1)]
    starts = [int(row[1]) for row in real]
    assert len(real) == 14, (
        f"{len(real)} of {len(rows)} rows are consecutive tokens of the stream: one row in four is"
        " synthetic"
    )
    covered = [
        start + offset
        for start, row in zip(starts, real, strict=True)
        for offset in range(len(row) - 1)
    ]
    assert len(covered) == len(set(covered)), "a token of the stream was read twice"
    assert all(row[0] == 0 for row in rows), "every row opens with END_OF_TEXT"
    assert starts != sorted(starts), "windows must be shuffled"


@pytest.mark.parametrize("kind", ["passkey", "needles", "records"])
@pytest.mark.parametrize("budget", [96, 200, 700])
def test_a_synthetic_document_says_every_answer_before_it_is_asked(tokenizer, stream, kind, budget):
    rows = SyntheticRows(tokenizer, stream)
    answered = 0
    for seed in range(10):
        draft = getattr(rows, kind)(budget, np.random.default_rng(seed))
        assert len(draft.tokens) == len(draft.weights) <= budget, (
            f"{kind=} {seed=}: {len(draft.tokens)=}"
        )
        marked = np.array(draft.weights) > 1
        for start in np.flatnonzero(marked & ~np.roll(marked, 1)):
            stop = start + int(np.argmin(np.append(marked[start:], False)))
            answer, before = (
                tokenizer.decode(draft.tokens[start:stop]).strip(),
                tokenizer.decode(draft.tokens[:start]),
            )
            assert answer in before, f"{kind=} {seed=}: {answer=} was not said before it was asked"
            answered += 1
    assert answered >= 5, f"{kind=} {budget=}: only {answered} answers in 10 documents"


def test_synthetic_rows_have_the_asked_length_and_a_weight_per_target(tokenizer, stream):
    rows = SyntheticRows(tokenizer, stream)
    for length in (64, 256, 1024):
        tokens, weights = rows.row(length, np.random.default_rng(length))
        assert (tokens.shape, weights.shape) == ((length + 1,), (length,))
        assert length < 256 or ANSWER_WEIGHT in weights or 1.0 in weights


def test_training_logits_equal_the_models_forward_pass(llama):
    tokens = jax.random.randint(
        jax.random.key(1), (2, 600), 0, llama.config.vocab_size
    )  # more than two query blocks
    logits = jax.jit(training_logits)
    expected = jax.jit(forward)(llama, tokens)
    np.testing.assert_allclose(logits(llama, tokens), expected, atol=2e-5)
    altered = logits(llama, tokens.at[:, 0].add(1))
    assert float(jnp.abs(altered - expected)[:, -1].max()) > 1e-4, (
        "the last logits must depend on the first token"
    )


def test_the_gradient_is_that_of_the_plain_loss_and_ignores_tokens_without_weight(llama):
    rows = jax.random.randint(jax.random.key(2), (2, 41), 0, llama.config.vocab_size)
    weights = jnp.ones((2, 40)).at[:, 20:].set(0)

    def plain(model: Llama) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(forward(model, rows[:, :-1]))
        return -jnp.take_along_axis(log_probabilities, rows[:, 1:, None], axis=-1)[:, :20].mean()

    expected, found = (
        state.parameters_of(jax.jit(jax.grad(loss))(llama))
        for loss in (plain, lambda model: weighted_loss(model, rows, weights))
    )
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6, err_msg=name)


def test_a_wired_model_repeats_what_it_has_read_before_any_training():
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=256,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=train.ROPE_THETA),
    )
    random = Llama(config, rngs=nnx.Rngs(0))
    segment = jax.random.randint(jax.random.key(3), (1, 100), 1, 400)
    rows = jnp.concatenate([jnp.zeros((1, 1), segment.dtype), segment, segment, segment], axis=1)
    repeated = {}
    for name, model in (
        ("random", random),
        ("wired", wire_induction(random, np.ones(400), seed=0)),
    ):
        right = jnp.argmax(jax.jit(training_logits)(model, rows[:, :-1]), -1) == rows[:, 1:]
        repeated[name] = float(right[:, 102:].mean())
    assert repeated["wired"] > 0.8, f"{repeated=}: share of the repeated tokens ranked first"
    assert repeated["random"] < 0.1, f"{repeated=}: the random model must not know them"


def test_wiring_refuses_a_model_of_another_shape(llama):
    shape = dataclasses.replace(llama.config, num_attention_heads=2)
    with pytest.raises(ValueError, match="num_attention_heads=2 must be 4"):
        wire_induction(Llama(shape, rngs=nnx.Rngs(0)), np.ones(shape.vocab_size), seed=0)


def toy_run(directory: Path, curriculum: str, *more: str) -> int:
    corpus_dir = directory / "corpus"
    if not corpus_dir.exists():
        corpus_dir.mkdir(parents=True)
        (corpus_dir / "toy.txt").write_text(
            "".join(f"{sentences(40, seed)}\n{END_OF_TEXT}\n" for seed in range(250))
        )
    sizes = (
        "--vocab-size 300 --hidden-size 128 --intermediate-size 64 --layers 1 --tokens-per-step 512"
    )
    sizes += " --warmup-steps 2 --decay-steps 1 --initialization random"
    places = [
        "--corpus",
        str(corpus_dir),
        "--out",
        str(directory / "run"),
        "--curriculum",
        curriculum,
        "--probe-every",
        "1000",
    ]
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # optax's bias correction mixes Python floats and int32 counts
        return train.main([*places, *sizes.split(), *more])


def test_a_resumed_run_ends_with_the_parameters_of_an_uninterrupted_one(tmp_path):
    assert toy_run(tmp_path / "whole", "128:20") == 0
    assert toy_run(tmp_path / "parts", "128:20", "--until", "8") == 0
    halfway = load_file(tmp_path / "parts/run/checkpoint.safetensors")
    assert toy_run(tmp_path / "parts", "128:20") == 0
    whole, resumed = (
        load_file(tmp_path / f"{name}/run/checkpoint.safetensors") for name in ("whole", "parts")
    )
    assert whole.keys() == resumed.keys()
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name], err_msg=name)
    assert not np.array_equal(halfway["parameters/embed/value"], whole["parameters/embed/value"])

    history = json.loads((tmp_path / "parts/run/history.json").read_text())
    assert [entry["step"] for entry in history] == list(range(1, 21))
    first, last = history[0]["loss"], np.mean([entry["loss"] for entry in history[-4:]])
    assert last < 0.8 * first, f"the loss went from {first} to {last}"
    assert (tmp_path / "parts/run/loss.png").stat().st_size > 1000


def test_a_checkpoint_of_another_model_is_refused_by_tensor_name(llama, tmp_path):
    parameters = state.parameters_of(llama)
    optimizer = state.make_optimizer(state.OptimizerPlan(1e-3, 1.0, 1, 1, 2, 0.0, 1.0))
    optimizer_state = optimizer.init(parameters)
    state.save_checkpoint(
        tmp_path / "c.safetensors", 3, parameters, optimizer_state, {"curriculum": "256:1"}
    )
    assert state.checkpoint_notes(tmp_path / "c.safetensors") == (3, {"curriculum": "256:1"})
    wider = {name: jnp.zeros((*leaf.shape, 2)) for name, leaf in parameters.items()}
    with pytest.raises(ValueError, match="tensor 'parameters/embed"):
        state.load_checkpoint(tmp_path / "c.safetensors", wider, optimizer_state)


def test_learning_rate_rises_stays_and_falls_to_zero():
    plan = state.OptimizerPlan(
        learning_rate=2.0,
        embedding_rate=1.0,
        warmup_steps=4,
        decay_steps=5,
        total_steps=20,
        weight_decay=0.0,
        clip_norm=1.0,
    )
    rates = [float(plan.rate(step)) for step in (0, 3, 10, 15, 19, 20)]
    np.testing.assert_allclose(rates, [0.5, 2.0, 2.0, 2.0, 0.4, 0.0])


def test_a_model_that_knows_nothing_scores_the_vocabulary_size(llama, tokenizer):
    blank = state.with_parameters(
        llama, {name: jnp.zeros_like(leaf) for name, leaf in state.parameters_of(llama).items()}
    )
    text = sentences(60, 9)
    score = score_text(blank, tokenizer, text, window=128)
    assert score.perplexity == pytest.approx(llama.config.vocab_size, rel=1e-4)
    assert score.bits_per_byte == pytest.approx(
        np.log2(llama.config.vocab_size) * score.tokens / score.utf8_bytes, rel=1e-4
    )
    assert len(text) - 128 * 8 < score.characters <= len(text)
    recall = passkey_recall(blank, tokenizer, text, [16, 64], trials=2)
    assert {distance: value["exact"] for distance, value in recall.items()} == {16: 0.0, 64: 0.0}


def test_greedy_text_begins_with_its_prompt_and_adds_the_first_choices(llama, tokenizer):
    text = greedy_text(llama, tokenizer, "the quick", 5)
    prompt = tokenizer.encode("the quick").ids
    chosen = int(jnp.argmax(forward(llama, jnp.array([prompt]))[0, -1]))
    assert text.startswith("the quick" + tokenizer.decode([chosen])), f"{text=}"


def test_user_errors_are_one_line(tmp_path, capsys):
    assert train.main(["--corpus", str(tmp_path), "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == f"error: corpus {str(tmp_path)!r} has no .txt files\n"


def test_the_saved_tokenizer_reads_back_equal(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 1024)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
