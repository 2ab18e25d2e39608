"""Random histories of caches: whatever was done to a row, it is what a fresh cache of its tokens is
(laboratory/tests/cache_histories.py).

KVQ_HISTORIES=20 draws that many long histories for each row of the whole table; two short ones of a
few run by default.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import kvq_jax as kvq
from kvq_jax.attention import streaming
from kvq_jax.cache import row_operations
from kvq_jax.layer.regions import Regions
from laboratory.tests.cache_histories import BATCH, Histories
from laboratory.tests.cache_programs import SOUND, Programs, compiled
from tests.kvq_jax.layer_runs import CAPACITY, STEP
from tests.methods_table import METHOD_CASES, MethodCase

COUNT = int(os.environ.get("KVQ_HISTORIES", "0"))
DEFAULT = ("xquant_cl2",)  # its layers build on each other; that of near-exact codes has statistics
OPERATIONS = 40 if COUNT else 12  # of one history
NEAR_EXACT = "innerq:bits=8,mode=sym,sink=2,recent=4,block=8"
ERROR = 5e-2  # of its attention, at most: one head of one token's output, relative to it

tokens = st.lists(st.integers(0, CAPACITY), min_size=BATCH, max_size=BATCH).map(
    lambda n: np.array(n, np.int32)
)
steps = st.lists(st.integers(0, STEP), min_size=BATCH, max_size=BATCH).map(
    lambda n: np.array(n, np.int32)
)
active = st.lists(st.integers(0, 1), min_size=BATCH, max_size=BATCH).map(
    lambda n: np.array(n, np.int32)
)


def rows(count: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(0, count - 1), min_size=BATCH, max_size=BATCH).map(
        lambda n: np.array(n, np.int32)
    )


class Machine(RuleBasedStateMachine):
    """Draws a history."""

    def __init__(self, make: Callable[[], Histories], done: dict[str, int]):
        super().__init__()
        self.histories, self.done = make(), done

    @rule(counts=tokens)
    def prefill(self, counts: np.ndarray) -> None:
        self.histories.prefill(counts)

    @rule(counts=steps)
    def decode_several(self, counts: np.ndarray) -> None:
        self.histories.decode(counts)

    @rule(counts=active)
    def decode_one(self, counts: np.ndarray) -> None:
        self.histories.decode(counts, 1)

    @rule(kept=tokens)
    def trim(self, kept: np.ndarray) -> None:
        self.histories.trim(kept)

    @rule(dropped=steps)
    def take_back(self, dropped: np.ndarray) -> None:
        self.histories.trim(np.maximum(self.histories.known.lengths - dropped, 0))

    @rule(index=rows(BATCH))
    def select(self, index: np.ndarray) -> None:
        self.histories.select(index)

    @rule(index=rows(2 * BATCH))
    def repeat(self, index: np.ndarray) -> None:
        self.histories.repeat(index)

    @precondition(lambda self: self.histories.known.lengths.any())
    @rule()
    def put_aside(self) -> None:
        self.histories.put_aside()

    @rule(index=rows(2 * BATCH))
    def merge(self, index: np.ndarray) -> None:
        self.histories.merge(index)

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.histories.save_and_load(pathlib.Path(folder))

    def teardown(self) -> None:
        self.done["histories"] = self.done.get("histories", 0) + 1
        self.done["operations"] = self.done.get("operations", 0) + self.histories.operations
        self.done["comparisons"] = self.done.get("comparisons", 0) + self.histories.comparisons


def run_histories(make: Callable[[], Histories], count: int) -> dict[str, int]:
    """Draw `count` histories. Raises AssertionError, with the shortest sequence of operations that
    still fails, if one is wrong."""
    done: dict[str, int] = {}
    run_state_machine_as_test(
        lambda: Machine(make, done),
        settings=settings(
            max_examples=count,
            stateful_step_count=OPERATIONS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return done


CHOSEN = [case for case in METHOD_CASES if COUNT or case.id in DEFAULT]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_a_row_is_what_a_fresh_cache_of_its_tokens_is(case: MethodCase, record_property):
    done = run_histories(lambda: Histories(case.spec, bodies=case.same_codes_in_decode), COUNT or 2)
    assert done["comparisons"] > done["operations"] > 0
    record_property("done", done)
    print(f"{case.id}: {done}")


# --- near-exact codes and small chunks: what a fresh cache cannot see, as it has the same fault


def near_exact(programs: Programs = SOUND) -> Histories:
    return Histories(NEAR_EXACT, exact=ERROR, programs=programs)


def test_attention_of_near_exact_codes_is_that_of_the_tokens(record_property):
    done = run_histories(near_exact, COUNT or 2)
    assert done["comparisons"] > done["operations"] > 0
    record_property("done", done)


def short_history(programs: Programs = SOUND) -> Histories:
    """Fill rows, step over chunks, drop all of some rows and start them again without a prompt,
    change rows, go on."""
    histories, each = near_exact(programs), np.arange(BATCH, dtype=np.int32)
    histories.prefill(30 + 7 * each)
    histories.decode(np.full(BATCH, STEP, np.int32))
    histories.trim(np.where(each % 2, 0, 50).astype(np.int32))
    histories.decode(np.full(BATCH, STEP, np.int32))
    histories.select(each[::-1].copy())
    histories.decode(each % (STEP + 1))
    return histories


def statistics_are_kept(patch: pytest.MonkeyPatch) -> None:
    """A row that was trimmed to nothing has the statistics of the prompt that it had."""
    real = row_operations._trim_layer

    def trim_layer(plan: Any, params: Any, state: Any, *rest: Any) -> Any:
        after, below = real(plan, params, state, *rest)
        return dataclasses.replace(after, stats=state.stats), below

    patch.setattr(row_operations, "_trim_layer", trim_layer)


def the_body_ends_one_block_early(patch: pytest.MonkeyPatch) -> None:
    """Attention takes the body for one block shorter than it is, and the window for longer, in
    every function alike."""
    real = streaming.attend

    def attend(
        plan: Any, params: Any, windows: Any, body: Any, inputs: Any, limits: Any, *rest: Any
    ) -> Any:
        return real(
            plan, params, windows, body, inputs, jnp.maximum(limits - plan.regions.block, 0), *rest
        )

    patch.setattr(streaming, "attend", attend)


def the_window_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Slots of the window are said to hold the token before the one they hold, where they are
    read."""
    real = streaming.view_of

    def view(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            positions = Regions.ring_positions
            inner.setattr(
                Regions, "ring_positions", lambda self, lengths: positions(self, lengths) - 1
            )
            return real(*args)

    patch.setattr(streaming, "view_of", view)


def a_window_is_its_neighbours(patch: pytest.MonkeyPatch) -> None:
    """The windows of selected rows are those of the rows beside them."""
    real = kvq.rows.select

    def select_rows(cache: Any, index: Any) -> Any:
        rows = real(cache, index)
        beside = real(cache, (index + 1) % cache.batch)
        layers = [
            dataclasses.replace(one, ring=other.ring)
            for one, other in zip(rows.layers, beside.layers, strict=True)
        ]
        return dataclasses.replace(rows, layers=tuple(layers))

    patch.setattr(kvq.rows, "select", select_rows)


FRESH, EXACT = (
    r"not what a fresh cache of the same tokens holds",
    r"off exact attention",
)  # how a fault is seen
FAULTS = {  # what it is in, and how it must be seen: a fresh cache has the second and third too
    statistics_are_kept: (("trim",), FRESH),
    the_body_ends_one_block_early: (("prefill", "decode"), EXACT),
    the_window_is_off_by_one: (("prefill", "decode"), EXACT),
    a_window_is_its_neighbours: (("selected",), FRESH),
}


def test_a_short_history_is_right_without_a_fault():
    worst = short_history().worst
    assert ERROR / 20 < worst < ERROR / 2, (
        f"{worst=}: the bound is not near what codes of 8 bits lose"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    places, message = FAULTS[fault]
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        short_history(
            dataclasses.replace(SOUND, **{place: getattr(compiled(), place) for place in places})
        )
