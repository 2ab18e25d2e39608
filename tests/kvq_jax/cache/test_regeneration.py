"""Answers that are generated again: `trim` takes tokens back, others come in their place, and the
cache forgets nothing of what remains."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_jax.attention.dispatch import NATIVE, XLA, Route
from kvq_jax.cache import row_operations
from kvq_jax.cache.row_operations import _trim_layer
from kvq_jax.layer.kept_codes import KeptCodes
from kvq_jax.layer.plan import LayerPlan, LayerState
from pallas_kernels.launch import Launch
from tests.kvq_jax.attention import test_dispatch as kernels
from tests.kvq_jax.cache_runs import DIMS, trim_layer
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    ROUNDING,
    STEP,
    decode,
    decode_rows,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
    sequences,
)
from tests.methods_table import MethodCase, cases

# of eight rows, none of which fills its body; cuts are in the first, a middle and the last block
FULL = np.array([74, 73, 72, 71, 70, 69, 68, 62], np.int32)
KEPT = np.array([66, 61, 50, 37, 29, 24, 18, 7], np.int32)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The first layer of a cache of eight rows."""

    plan: LayerPlan
    state: LayerState
    lengths: np.ndarray

    def filled(self, seed: int, *, prompt: bool = True) -> Layer:
        """Add tokens of a text up to FULL."""
        text, state, at = sequences(8, seed=seed), self.state, self.lengths
        program, tokens = (prefill, CAPACITY) if prompt else (decode, STEP)
        while (at < FULL).any():
            inputs = text.window(at, FULL, tokens)
            _, state, _ = program(self.plan, parameters_of(self.plan), state, inputs, ())
            at = np.minimum(at + tokens, FULL)
        return dataclasses.replace(self, state=state, lengths=FULL)

    def trimmed(self, kept: np.ndarray, program: Callable[..., Any] = trim_layer) -> Layer:
        params = parameters_of(self.plan)
        state, _ = program(self.plan, params, self.state, self.lengths, kept, None)
        return dataclasses.replace(self, state=state, lengths=kept)

    def rows(self) -> list[np.ndarray]:
        """Return the rows that each side stands for, zeros past the end."""
        lengths = jnp.asarray(self.lengths)
        sides = decode_rows(self.plan, parameters_of(self.plan), self.state, lengths, ())
        return [np.asarray(side) for side in sides]

    def blocks(self) -> list[np.ndarray]:
        """Return the bytes of every block of each body array, [B, blocks, bytes]."""
        block, arrays = self.plan.regions.block, []
        for codec, body in zip(self.plan.codecs, self.state.body, strict=True):
            specs = jax.tree.leaves(codec.body(1, 1, block))
            for spec, array in zip(specs, jax.tree.leaves(body), strict=True):
                first = np.moveaxis(np.asarray(array), spec.axis("tokens"), 1)
                arrays.append(
                    np.ascontiguousarray(first)
                    .reshape(len(array), -1, first[0, : spec["tokens"].size].size)
                    .view(np.uint8)
                )
        return arrays


def filled(spec: str) -> Layer:
    cache = kvq.init_cache(spec, DIMS, 8, CAPACITY, "float32")
    return Layer(cache.plans[0], cache.layers[0], np.zeros(8, np.int32)).filled(0)


def changed_blocks(before: Layer, after: Layer, kept: np.ndarray) -> int:
    """Return how many codes of whole blocks of kept tokens differ between two layers."""
    regions = before.plan.regions
    whole = [
        min(regions.aged_tokens(int(full)), max(int(n) - regions.sink, 0)) // regions.block
        for full, n in zip(FULL, kept, strict=True)
    ]
    pairs = zip(before.blocks(), after.blocks(), strict=True)
    return sum(
        int((one[row, :blocks] != other[row, :blocks]).sum())
        for one, other in pairs
        for row, blocks in enumerate(whole)
    )


def drift(case: MethodCase, answers: int, trim: Callable[..., Any]) -> float:
    """Return how much other answers move a kept token: its largest relative error to its value
    after the first trim."""
    layer = filled(case.spec).trimmed(KEPT, trim)
    first = layer.rows()
    for seed in range(1, answers + 1):
        layer = layer.filled(seed).trimmed(KEPT, trim)
    return max(row_errors(*pair).max() for pair in zip(layer.rows(), first, strict=True))


@cases()
def test_blocks_that_age_again_unchanged_keep_their_codes(case: MethodCase):
    before = filled(case.spec)
    after = before.trimmed(KEPT).filled(0)
    assert not changed_blocks(before, after, KEPT)
    spoiled = before.trimmed(np.maximum(KEPT - 16, 0)).filled(3)
    assert case.id == "dense" or changed_blocks(before, spoiled, KEPT), "other codes would pass"


@cases()
def test_answers_that_are_generated_again_do_not_move_what_remains(case: MethodCase):
    assert drift(case, 3, trim_layer) <= ROUNDING


@cases("turboquant3", "polar44", "gear2", "zipcache42", usual=("turboquant3",))
def test_a_trim_that_forgets_the_codes_is_caught(case: MethodCase, monkeypatch: pytest.MonkeyPatch):
    def after_trim(regions: Any, intact: Any, old: Any, new: Any) -> KeptCodes:
        return KeptCodes(jnp.zeros_like(intact), intact * 0, intact * 0, intact < 0)

    monkeypatch.setattr(row_operations, "after_trim", after_trim)
    traced_anew = inspect.unwrap(_trim_layer)
    forgetful = quick_jit(lambda *a: traced_anew(*a), static_argnums=0)
    before = filled(case.spec)
    assert changed_blocks(before, before.trimmed(KEPT, forgetful).filled(0), KEPT)
    assert drift(case, 3, forgetful) > 10 * ROUNDING


@cases("kivi2", "turboquant3")
def test_generated_tokens_let_codes_be_as_a_prompt_does(case: MethodCase):
    before = filled(case.spec)
    assert not changed_blocks(before, before.trimmed(KEPT).filled(0, prompt=False), KEPT)


@cases("turboquant3")
def test_a_row_that_fills_its_body_loses_the_codes_of_the_cut_block_alone(case: MethodCase):
    whole = np.full(8, CAPACITY, np.int32)
    layer = filled(case.spec).trimmed(KEPT)
    text = sequences(8, seed=1).window(KEPT, whole, CAPACITY)
    _, state, _ = prefill(layer.plan, parameters_of(layer.plan), layer.state, text, ())
    full = dataclasses.replace(layer, state=state, lengths=whole)
    again = full.trimmed(KEPT)
    assert not changed_blocks(layer, again, KEPT)
    seen = full.rows()
    for one, other in zip(again.rows(), seen, strict=True):
        np.testing.assert_array_equal(one, np.where(one == 0, 0, other))


@cases("turboquant3")
def test_kept_codes_go_with_their_rows(case: MethodCase, tmp_path: Any):
    """Rows that are selected, and rows that were saved, keep what they had."""
    before = filled(case.spec)
    cut = before.trimmed(KEPT)
    shell = kvq.init_cache(case.spec, DIMS, 8, CAPACITY, "float32")
    cache = dataclasses.replace(
        shell, layers=(cut.state, *shell.layers[1:]), lengths=jnp.asarray(KEPT)
    )
    kvq.files.save(cache, tmp_path / "cache")
    turned = kvq.rows.select(kvq.files.load(tmp_path / "cache"), np.arange(8)[::-1])
    back = kvq.rows.select(turned, np.arange(8)[::-1]).layers[0]
    after = dataclasses.replace(cut, state=back).filled(0)
    assert not changed_blocks(before, after, KEPT)
    np.testing.assert_array_equal(back.intact, cut.state.intact)


def test_a_row_that_starts_anew_has_no_codes_of_the_old_one():
    layer = filled("kivi:sink=0,recent=12,block=16").trimmed(KEPT)
    begun = dataclasses.replace(layer, lengths=np.zeros(8, np.int32)).filled(5)
    fresh = filled("kivi:sink=0,recent=12,block=16")
    fresh = dataclasses.replace(fresh, lengths=np.zeros(8, np.int32)).filled(5)
    whole = np.full(8, CAPACITY, np.int32)
    assert not changed_blocks(begun, fresh, whole)
    assert int(layer.state.intact.max()) > 0 == int(begun.state.intact.max())


@pytest.mark.parametrize(
    "route", [XLA, NATIVE, Route("pallas", Launch(interpret=True))], ids=lambda route: route.name
)
def test_a_step_of_one_token_leaves_codes_on_every_route(route: Route):
    """A block of turboquant is taken back, and ages again in a step of one token."""
    if route == NATIVE and (reason := dispatch.no_device("native")):
        pytest.skip(reason)
    cache = kvq.init_cache("turboquant:recent=64,block=32", kernels.DIMS, 5, 416, "bfloat16")
    plan, state, params = cache.plans[0], cache.layers[0], parameters_of(cache.plans[0])
    full, kept, before = (np.full(5, n, np.int32) for n in (200, 120, 127))
    assert (
        plan.regions.aged_tokens(127)
        < plan.regions.aged_tokens(128)
        < plan.regions.aged_tokens(200)
    )

    def added(state: LayerState, start: np.ndarray, stop: np.ndarray, tokens: int) -> LayerState:
        inputs = kernels.tokens().window(start, stop, tokens)
        if tokens == 1:
            return kernels.decode(plan, params, state, inputs, (), route=route)[1]
        return kernels.prefill(plan, params, state, inputs, (), route=XLA)[1]

    state = added(state, np.zeros(5, np.int32), full, 416)
    state, _ = trim_layer(plan, params, state, full, kept, None)
    state = added(state, kept, before, 416)
    step = added(state, before, before + 1, 1)
    for one, other in zip(jax.tree.leaves(state.body), jax.tree.leaves(step.body), strict=True):
        np.testing.assert_array_equal(one, other)
    forgetful = dataclasses.replace(state, intact=jnp.zeros(5, jnp.int32))
    written = added(forgetful, before, before + 1, 1)
    pairs = zip(jax.tree.leaves(state.body), jax.tree.leaves(written.body), strict=True)
    assert any((np.asarray(one) != np.asarray(other)).any() for one, other in pairs)
