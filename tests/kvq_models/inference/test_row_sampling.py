"""Rows with separate sampling rules: each draws what `sample` draws for its rule, whatever the
other rows ask for."""

import jax
import jax.numpy as jnp
import numpy as np

from kvq_models.inference.row_sampling import (
    MAX_ALTERNATIVES,
    RowRule,
    RowRules,
    draw,
    filter_rows,
    row_rules,
)
from kvq_models.inference.sampling import Sampling, best_token, filter_logits, sample

VOCABULARY, ROWS = 96, 8
RULES = (
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.6),
    Sampling(2.0, top_k=12, top_p=0.8, min_p=0.02),
    Sampling(0.9, min_p=0.3),
    Sampling(1.0, top_k=1),
    Sampling(5.0, top_k=VOCABULARY + 7),
)
jitted, alone = jax.jit(draw), jax.jit(sample, static_argnames="sampling")


def rules_of(
    rules: tuple[Sampling, ...], seed: int, step: int, alternatives: bool = False
) -> RowRules:
    return row_rules(RowRule(rule, seed, row, step, alternatives) for row, rule in enumerate(rules))


def logits_of(seed: int) -> jax.Array:
    return (
        jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, VOCABULARY)).astype(np.float32))
        * 3
    )


def test_each_row_draws_what_sample_draws_for_its_rule():
    drawn, expected = [], []
    for step in range(12):
        logits = logits_of(step)
        found = jitted(logits, rules_of(RULES, seed=3, step=step))
        drawn.append(np.asarray(found.token))
        each = [
            alone(logits, sampling=rule, key=jax.random.key(3), step=jnp.int32(step))
            for rule in RULES
        ]
        expected.append([int(tokens[row]) for row, (tokens, _) in enumerate(each)])
        wanted = [float(logprobs[row]) for row, (_, logprobs) in enumerate(each)]
        np.testing.assert_allclose(found.logprob, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{step=}")
    np.testing.assert_array_equal(drawn, expected)
    greedy = np.stack([np.asarray(jnp.argmax(logits_of(step), -1)) for step in range(12)])
    assert (np.array(drawn) != greedy).any(axis=0).tolist() == [
        rule.temperature > 0 and rule.top_k != 1 for rule in RULES
    ]


def test_a_row_draws_the_same_bits_in_any_company():
    logits = logits_of(1)
    crowd = jitted(logits, rules_of(RULES, seed=5, step=2, alternatives=True))
    for row, rule in enumerate(RULES):
        others = rules_of(
            tuple(rule if i == row else Sampling() for i in range(ROWS)), seed=5, step=2
        )
        found = jitted(jnp.where((np.arange(ROWS) == row)[:, None], logits, jnp.nan), others)
        for name in ("token", "logprob", "finite"):
            assert getattr(found, name)[row] == getattr(crowd, name)[row], (row, name)
        assert not np.delete(np.asarray(found.finite), row).any()


def test_alternatives_are_the_most_probable_tokens():
    logits = logits_of(2)
    found = jitted(logits, rules_of(RULES, seed=0, step=0, alternatives=True))
    order = np.argsort(-np.asarray(logits), axis=-1)[:, :MAX_ALTERNATIVES]
    np.testing.assert_array_equal(found.likely, order)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits, axis=-1)), order, axis=-1)
    np.testing.assert_allclose(found.likely_logprobs, expected, rtol=1e-5, atol=1e-5)


def test_the_best_token_is_the_first_of_equals_and_in_the_vocabulary():
    logits = np.random.default_rng(0).integers(0, 4, (5, 7, 9)).astype(np.float32)
    logits[0, 0], logits[0, 1, 2] = -np.inf, np.inf
    best = np.asarray(best_token(jnp.asarray(logits)))
    np.testing.assert_array_equal(best, logits.argmax(axis=-1))
    assert not np.array_equal(best, np.full_like(best, 8) - logits[..., ::-1].argmax(axis=-1))
    assert 0 <= int(best_token(jnp.full((9,), jnp.nan))) < 9


def test_a_temperature_near_0_draws_the_most_probable_token():
    logits, best = logits_of(4), np.asarray(best_token(logits_of(4)))
    for temperature in (1e-25, 1e-37, 1.2e-38, 1e-40, 1e-320):
        for rule in (Sampling(temperature), Sampling(temperature, top_p=0.9)):
            rows = jitted(logits, rules_of((rule,) * ROWS, seed=0, step=0))
            np.testing.assert_array_equal(rows.token, best, f"{rule}")
            tokens, _ = sample(logits, rule, jax.random.key(0), jnp.int32(0))
            np.testing.assert_array_equal(tokens, best, f"{rule}")


def kept_by_definition(row: np.ndarray, rule: Sampling) -> np.ndarray:
    """Return a mask of the tokens that a rule keeps, by sorting them."""
    row = row.astype(float) / rule.temperature
    order = np.argsort(-row, kind="stable")
    last = min(rule.top_k or len(row), len(row)) - 1
    probabilities = np.exp(row[order] - row.max()) * (row[order] >= row[order][last])
    probabilities /= probabilities.sum()
    before = np.concatenate([[0], np.cumsum(probabilities)[:-1]])
    inside = (before < rule.top_p) | (rule.top_p == 1)
    minimum = row[order][(probabilities > 0) & inside].min()
    return (row >= minimum) & (row >= row.max() + np.log(rule.min_p or 1e-300))


def test_filters_keep_what_sorting_would_keep():
    rng, wrong, trials = np.random.default_rng(7), 0, 18  # each rule is compiled
    for trial in range(trials):
        logits = rng.normal(size=(ROWS, VOCABULARY)).astype(np.float32) * 4
        if trial % 2:
            logits = np.round(logits)  # equal logits are kept together
        if trial % 3 == 0:
            logits[:, ::7], logits[:, 1::7] = -np.inf, -0.0
        rules = [
            Sampling(
                float(rng.choice([0.5, 1, 2])),
                top_k=int(rng.choice([0, 1, 5, 40, VOCABULARY, VOCABULARY + 9])),
                top_p=float(rng.choice([1e-7, 0.31, 0.77, 0.953, 1])),
                min_p=float(rng.choice([0, 0.013, 1])),
            )
            for _ in range(ROWS)
        ]
        arrays = jax.tree.map(jnp.asarray, rules_of(tuple(rules), seed=0, step=0))
        together = np.asarray(filter_rows(jnp.asarray(logits), arrays)) > -np.inf
        for row, rule in enumerate(rules):
            want = kept_by_definition(logits[row], rule)
            np.testing.assert_array_equal(together[row], want, f"{trial=}, {rule}")
            one = np.asarray(filter_logits(jnp.asarray(logits[row : row + 1]), rule))[0]
            np.testing.assert_array_equal(one > -np.inf, want, f"{trial=}, {rule}")
            wrong += (kept_by_definition(logits[row], rules[row - 1]) != want).any()
    assert wrong > 2.5 * trials, "other rules keep the same tokens"
