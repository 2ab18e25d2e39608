"""Random histories of a model's cache: turns of a prompt and generated tokens, and trimmed tokens.

`generate` has separate loops. For each call the same cache also goes through `prefill` and single
decode steps: the tokens must be the same, and so must the cache afterwards, up to rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import kvq_jax as kvq
from kvq_models import Llama, decode_step, generate, prefill, prepare
from kvq_models.inference.method_parameters import parameters_for
from tests.compile_options import QUICK_COMPILE
from tests.kvq_models.checkpoints import random_llama, tiny_config

SPECS = ("kivi:bits=2,recent=8,block=32", "xquant_cl:bits=4,base_layer=0")
# a turn has at most so many tokens, an answer exactly so many
BATCH, CAPACITY, TURN, NEW = (
    2,
    64,
    12,
    7,
)
DIFFER = (
    2e-3  # of the entries, mainly codes, that may differ because two programs round differently
)

step = jax.jit(decode_step, donate_argnums=1, compiler_options=QUICK_COMPILE)
copied = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))


class Turns(RuleBasedStateMachine):
    def __init__(self, llama: Llama, spec: str, done: dict[str, int]):
        super().__init__()
        self.llama, self.done = llama, done
        self.cache = kvq.init_cache(spec, llama.config, BATCH, CAPACITY)
        self.lengths = np.zeros(BATCH, np.int32)

    @precondition(lambda self: self.lengths.max() + TURN + NEW <= CAPACITY)
    @rule(lengths=st.tuples(*[st.integers(1, TURN)] * BATCH), seed=st.integers(0, 99))
    def turn(self, lengths: tuple[int, ...], seed: int) -> None:
        """Give each row a prompt, and generate an answer."""
        tokens = np.random.default_rng(seed).integers(
            0, self.llama.config.vocab_size, (BATCH, TURN), np.int32
        )
        beside, counts = copied(self.cache), np.array(lengths, np.int32)
        answer = generate(self.llama, self.cache, tokens, counts, max_new_tokens=NEW)
        logits, beside = prefill(self.llama, beside, tokens, counts)
        expected = []
        for _ in range(NEW):
            expected.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            logits, beside = step(self.llama, beside, expected[-1])
        np.testing.assert_array_equal(
            answer.tokens, jnp.stack(expected, axis=1), err_msg="generated tokens"
        )
        self.cache = answer.cache
        held = np.asarray(self.cache.lengths)
        np.testing.assert_array_equal(held, self.lengths + counts + NEW, err_msg="lengths")
        for path, (one, other) in enumerate(
            zip(jax.tree.leaves(self.cache), jax.tree.leaves(beside), strict=True)
        ):
            differ = np.count_nonzero(~np.isclose(one, other, rtol=1e-5, atol=1e-5))
            assert differ <= DIFFER * one.size, f"array {path} of the cache: {differ} of {one.size}"
        self.lengths = held
        self.done["turns"] = self.done.get("turns", 0) + 1

    @precondition(lambda self: self.lengths.any())
    @rule(taken=st.tuples(*[st.integers(0, CAPACITY)] * BATCH))
    def take_back(self, taken: tuple[int, ...]) -> None:
        self.lengths = np.maximum(self.lengths - np.array(taken, np.int32), 0)
        self.cache = self.trimmed(self.cache, self.lengths)
        self.done["trims"] = self.done.get("trims", 0) + 1

    def trimmed(self, cache: kvq.Cache, lengths: np.ndarray) -> kvq.Cache:
        return kvq.trim(cache, lengths, parameters_for(self.llama, cache.spec))


@pytest.fixture(scope="module")
def llama() -> Llama:
    return random_llama(tiny_config())


def run(llama: Llama, spec: str, phases: tuple[Phase, ...] = tuple(Phase)) -> dict[str, int]:
    done: dict[str, int] = {}
    prepared = prepare(llama, spec)
    run_state_machine_as_test(
        lambda: Turns(prepared, spec, done),
        settings=settings(
            max_examples=3,
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
        ),
    )
    return done


@pytest.mark.parametrize("spec", SPECS)
def test_turns_of_generate_are_those_of_single_steps(llama: Llama, spec: str):
    done = run(llama, spec)
    assert done["turns"] > 5, done
    assert done["trims"] > 1, done


def test_a_prompt_with_another_token_would_be_noticed(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
):
    real = generate

    def other(
        llama: Llama, cache: kvq.Cache, tokens: np.ndarray, *rest: Any, **options: Any
    ) -> Any:
        return real(
            llama,
            cache,
            (tokens + (np.arange(TURN) == 0)) % llama.config.vocab_size,
            *rest,
            **options,
        )

    monkeypatch.setattr(sys.modules[__name__], "generate", other)
    with pytest.raises(AssertionError, match=r"generated tokens|of the cache"):
        run(llama, SPECS[0], (Phase.generate,))  # no search for a shorter history
