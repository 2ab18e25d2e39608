"""A prompt of one token gives statistics as good as one of 64."""

import dataclasses

import jax
import numpy as np

from kvq_jax.codecs.prompt_statistics import Statistics
from kvq_jax.codecs.wrapper import Wrapper
from kvq_jax.layer.plan import LayerPlan, by_side
from tests.kvq_jax import layer_runs
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    Sequences,
    decode_rows,
    empty,
    parameters_of,
    sequences,
)
from tests.methods_table import MethodCase, cases

PROMPTS = np.array([1, 2, 4, 8, 16, 26, 48, 64], np.int32)
LENGTHS = np.full(8, CAPACITY, np.int32)
WORSE = 1.25  # times the error after a long prompt, at most
WITH = (
    *("innerq2", "innerq2_no_bias", "squat2", "polar_global"),
    *("kvquant3_online", "fp8", "fp8_head", "nvfp4", "zipcache42"),
)


def text() -> Sequences:
    """Return one text in eight rows. Its first token is a tenth of the others, as the values of
    attention sinks are."""
    one = sequences(8).rows([0] * 8)
    scale = np.ones((1, 1, CAPACITY, 1), np.float32)
    scale[:, :, 0] = 0.1
    parts = {
        name: np.roll(getattr(one, name), -5, axis=2) * scale for name in ("k_pre", "k_rot", "v")
    }
    return dataclasses.replace(one, **parts)


def errors(plan: LayerPlan) -> list[np.ndarray]:
    """Return, for each side, the relative error [8] of the body's tokens after each prompt."""
    tokens, params = text(), parameters_of(plan)
    _, state = layer_runs.run(plan, plan.init(8, "float32"), tokens, PROMPTS, LENGTHS)
    inputs = tokens.window(np.zeros_like(LENGTHS), LENGTHS, CAPACITY)
    read = decode_rows(plan, params, state, jax.numpy.asarray(LENGTHS), tokens.below(plan))
    body = slice(plan.regions.sink, plan.regions.sink + plan.regions.aged_tokens(CAPACITY))
    found = []
    for codec, side_params, rows in zip(plan.codecs, by_side(params), read, strict=False):
        exact = np.asarray(codec.rows(side_params, inputs), np.float32)[:, :, body]
        wrong = np.asarray(rows)[:, :, body] - exact
        found.append(np.sqrt((wrong**2).sum((1, 2, 3)) / (exact**2).sum((1, 2, 3))))
    return found


class Fixed(Wrapper):
    """Control: the first tokens that are seen fix the statistics."""

    @property
    def statistics(self) -> Statistics:
        return dataclasses.replace(self.inner.statistics, widens=False)


@cases(*WITH, usual=("innerq2", "kvquant3_online", "fp8", "nvfp4", "polar_global"))
def test_a_short_prompt_is_as_good_as_a_long_one(case: MethodCase):
    plan, _ = empty(case.spec)
    for side, found in zip(plan.names, errors(plan), strict=True):
        assert found.max() <= WORSE * found[-1], f"{side}, after prompts of {PROMPTS}: {found}"


@cases("fp8", "nvfp4", "polar_global", "innerq2", usual=("fp8",))
def test_statistics_of_the_first_token_alone_are_caught(case: MethodCase):
    plan, _ = empty(case.spec)
    fixed = dataclasses.replace(plan, k=Fixed(plan.k), v=Fixed(plan.v))
    assert any(found.max() > WORSE * found[-1] for found in errors(fixed))
