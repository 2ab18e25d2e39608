"""InnerQ's key norm comes from all keys of the prompt, those of the sink included."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.kvq_jax.layer_runs import CAPACITY, Sequences, empty, prefill, sequences

SINK = 32
SPEC = f"innerq:sink={SINK},recent=8,block=16"


def ramp() -> Sequences:
    """Sequences in which each token's keys are larger than those of the one before: the last token
    of a prompt sets the norm."""
    tokens = sequences(seed=6)
    louder = np.linspace(2, 30, CAPACITY, dtype=np.float32)[None, None, :, None]
    return dataclasses.replace(tokens, k_rot=np.sign(tokens.k_rot) * louder)


def found_norms(tokens: Sequences, prompts: np.ndarray) -> np.ndarray:
    plan, state = empty(SPEC)
    _, after, _ = prefill(plan, (), state, tokens.window(0 * prompts, prompts, CAPACITY), ())
    return np.asarray(after.stats[0])


def norms(tokens: Sequences, prompts: np.ndarray, first: int = 0, after: int = 0) -> np.ndarray:
    """By hand: the norms of the keys first .. prompt + after - 1 of each row, 1 where there are
    none."""
    keys = [np.abs(row[:, first : n + after]) for row, n in zip(tokens.k_rot, prompts, strict=True)]
    return np.stack(
        [
            (
                np.sqrt(k.max(axis=1, keepdims=True))
                if k.size
                else np.ones_like(tokens.k_rot[0, :, :1])
            )
            for k in keys
        ]
    )


def test_the_norm_of_a_prompt_counts_all_its_keys_however_short_it_is():
    """Prompts that end inside the sink, at its end, one token later and far behind it."""
    prompts = np.array([0, 1, 20, 31, SINK, SINK + 1, 64, CAPACITY - 1], np.int32)
    for tokens, others in ((sequences(), {"first": SINK}), (ramp(), {"after": 1})):
        found = found_norms(tokens, prompts)
        np.testing.assert_allclose(found, norms(tokens, prompts), rtol=1e-6)
        for b, n in enumerate(prompts):
            same = np.allclose(found[b], norms(tokens, prompts, **others)[b], rtol=1e-3)
            assert same == (n == 0 and "first" in others), (
                f"a prompt of {n} tokens: the norm of {others} would pass"
            )
