"""A batch of sequences in a cache is followed, operation by operation, beside an oracle that knows
only the tokens.

The oracle holds, for each row, the tokens that it has, the prompt that fixed its statistics, the
values of tokens that went through the body and came back by `trim` (the values that attention saw:
decoded from a state that was just found equal), and the values that each block was quantized from.
A block that ages again unchanged keeps its codes, so these stay as they were, and the tokens of a
block that is cut again come back with their first value: a drifted one is found. After every
operation a fresh cache is given all of that at once, and must hold the same. A decode step is also
made in the fresh cache: its outputs must be the same.

A fresh cache has the faults of the code that filled it. If codes are near exact, outputs of
prompts and steps are compared with attention over the rows themselves, too (`exact`), which needs
nothing of a cache.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.layer.plan import LayerPlan, LayerState, by_side
from kvq_jax.types.array_types import Tree
from laboratory.tests.cache_programs import SOUND, Programs
from laboratory.tests.known_tokens import Known, exact_attention
from laboratory.tests.vocabulary import WORDS, layer_inputs
from tests.kvq_jax import layer_runs
from tests.kvq_jax.cache_runs import DIMS, rows_of
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    ROUNDING,
    STEP,
    beyond_rounding,
    differences,
    live,
    parameters_of,
)

BATCH = 8
# relative error of an output if the codes of two functions differ, which one in 10^4 may
CODES_DIFFER = 2e-2


_statistics_of = layer_runs.quick_jit(
    lambda codec, params, inputs: codec.statistics.of(params, inputs), static_argnums=0
)


class Histories:
    """A cache of BATCH rows, changed by its methods; each looks at the cache afterwards and raises
    AssertionError if it is not what the oracle says. `comparisons` counts arrays that were
    compared.

    exact: the relative error that an output may have against exact attention; None if codes are
    coarse. bodies: False if generated tokens are coded in another way than a prompt's, on
    purpose; then the body is not compared.
    """

    def __init__(
        self,
        spec: str,
        *,
        bodies: bool = True,
        exact: float | None = None,
        programs: Programs = SOUND,
    ):
        self.cache = kvq.init_cache(spec, DIMS, BATCH, CAPACITY, "float32")
        self.plans, self.programs, self.bodies, self.exact = (
            self.cache.plans,
            programs,
            bodies,
            exact,
        )
        self.params = tuple(parameters_of(plan) for plan in self.plans)
        empty = [
            [np.zeros(s.shape, np.float32) for s in plan.layout(BATCH, "float32").ring]
            for plan in self.plans
        ]
        given = [
            [np.zeros((*r.shape[:2], CAPACITY, r.shape[3]), np.float32) for r in sides]
            for sides in empty
        ]
        self.initial = [jax.tree.map(np.asarray, state.stats) for state in self.cache.layers]
        returned = np.zeros((BATCH, CAPACITY), bool)
        self.known = Known(
            np.zeros((BATCH, CAPACITY), np.int32),
            np.zeros(BATCH, np.int32),
            copy.deepcopy(self.initial),
            returned,
            given,
            returned.copy(),
            copy.deepcopy(given),
            np.zeros(BATCH, np.int32),
        )
        self.new = self.cache
        self.fresh = self.cache
        self.aside = self.cache, self.known
        self.said = self.operations = self.comparisons = 0
        self.equal = [True] * len(
            self.plans
        )  # in bits, the codes and statistics of a layer and of the fresh one
        self.worst = 0.0  # error against exact attention

    # --- operations

    def prefill(self, counts: np.ndarray) -> None:
        """Give each row a prompt, or the next turn of one, of at most counts[b] tokens."""
        counts = np.minimum(counts, CAPACITY - self.known.lengths)
        start = self._say(counts, prefill=True)
        ids = self._window(start, CAPACITY)
        outputs = self._run(self.programs.prefill, ids, start, counts)
        self.check()
        for layer, (inputs, out) in enumerate(outputs):
            self._near_exact(layer, inputs, out, start, counts)

    def decode(self, counts: np.ndarray, tokens: int = STEP) -> None:
        """Generate at most `tokens` tokens in a step, counts[b] of them in row b: 0 if a row is
        not active. What exceeds the capacity is dropped."""
        counts = np.minimum(counts, tokens)
        stored = np.minimum(counts, CAPACITY - self.known.lengths)
        before = self.fresh
        start = self._say(stored)
        ids = self._window(start, tokens)
        outputs = self._run(self.programs.decode, ids, start, stored)
        carry: Tree = ()
        for layer, (plan, state) in enumerate(zip(self.plans, before.layers, strict=True)):
            inputs, out = outputs[layer]
            expected, _, carry = self.programs.decode(
                plan, self.params[layer], state, inputs, carry
            )
            if not self.bodies:
                continue
            real = np.asarray(inputs.valid)[:, None]
            error = np.where(
                real, layer_runs.row_errors(np.asarray(out), np.asarray(expected)), 0
            ).max(initial=0)
            self.comparisons += 1
            allowed = ROUNDING if self.equal[layer] else CODES_DIFFER
            assert error <= allowed, (
                f"{layer=}: a step's outputs differ from a fresh cache's by {error:.1e}"
            )
        self.check()
        for layer, (inputs, out) in enumerate(outputs):
            self._near_exact(layer, inputs, out, start, stored)

    def trim(self, kept: np.ndarray) -> None:
        known, kept = self.known, np.minimum(kept, self.known.lengths).astype(np.int32)
        seen = rows_of(self.cache)
        regions = self.plans[0].regions
        for b in range(BATCH):
            held = self._cut(b, int(kept[b]))
            back = slice(
                regions.sink + regions.aged_tokens(int(kept[b])),
                min(regions.sink + regions.aged_tokens(int(known.lengths[b])), held, int(kept[b])),
            )
            known.returned[b, kept[b] :] = False
            if back.start < back.stop:
                known.returned[b, back] = True
                for layer, sides in enumerate(known.given):
                    for side, rows in enumerate(sides):
                        rows[b, :, back] = seen[layer][side][b, :, back]
        known.lengths[:] = kept
        for mine, initial in zip(known.stats, self.initial, strict=True):
            for stat, first in zip(jax.tree.leaves(mine), jax.tree.leaves(initial), strict=True):
                stat[kept == 0] = first[kept == 0]
        self.cache = self.programs.trim(self.cache, jnp.asarray(kept), self.params)
        self.check()

    def _cut(self, b: int, kept: int) -> int:
        """Note which codes of a row remain. Return the first position whose token keeps the value
        that it came back with before: that of the block, if it was the last to be cut."""
        known, regions = self.known, self.plans[0].regions
        block, intact, aged = regions.block, int(known.intact[b]), int(known.lengths[b])
        aged = regions.aged_tokens(aged)
        if aged == regions.body_capacity:  # the body's last block takes the place of spare codes
            intact -= intact % block
        tokens = max(kept - regions.sink, 0)
        again = tokens <= intact and tokens // block == intact // block
        if regions.aged_tokens(kept) < aged:
            known.intact[b] = min(tokens, max(intact, aged))
        else:
            known.intact[b] = min(tokens, intact)
        return regions.sink + tokens // block * block if again else regions.capacity

    def select(self, index: np.ndarray) -> None:
        self.known = self.known.rows(index)
        self.cache = self.programs.selected(self.cache, jnp.asarray(index))
        self.check()

    def repeat(self, index: np.ndarray) -> None:
        """Repeat every row, and keep BATCH of the copies."""
        self.known = self.known.rows(index // 2)
        self.cache = self.programs.repeated(self.cache, jnp.asarray(index))
        self.check()

    def put_aside(self) -> None:
        self.aside = self.cache, copy.deepcopy(self.known)

    def merge(self, index: np.ndarray) -> None:
        """Join the rows with those that were put aside, and keep BATCH of them."""
        self.known = self.known.rows(index, self.aside[1])
        self.cache = self.programs.merged(self.cache, self.aside[0], jnp.asarray(index))
        self.check()

    def save_and_load(self, folder: pathlib.Path) -> None:
        kvq.files.save(self.cache, folder / "cache.safetensors")
        self.cache = kvq.files.load(
            folder / "cache.safetensors", spec=self.cache.spec, config=DIMS, capacity=CAPACITY
        )
        self.check()

    # --- what must be true

    def check(self) -> None:
        """Compare the cache with a fresh one that is given the same."""
        self.operations += 1
        lengths, layers, carry = self.known.lengths, [], ()
        np.testing.assert_array_equal(self.cache.lengths, lengths, err_msg="lengths")
        self.equal, zero = [], np.zeros(BATCH, np.int32)
        for layer, plan in enumerate(self.plans):
            inputs = layer_inputs(layer, self.known.ids, zero, lengths)
            stats = jax.tree.map(jnp.asarray, self.known.stats[layer])
            state = dataclasses.replace(self.new.layers[layer], stats=stats)
            given, sources = (
                tuple(jnp.asarray(rows) for rows in kind[layer])
                for kind in (self.known.given, self.known.sources)
            )
            state, carry = self.programs.fill(
                plan,
                self.params[layer],
                state,
                inputs,
                carry,
                (given, jnp.asarray(self.known.returned)),
                (sources, jnp.asarray(self.known.recoded)),
            )
            layers.append(self._with_intact(plan, state, self.cache.layers[layer]))
            found, expected = (live(plan, s, lengths) for s in (self.cache.layers[layer], state))
            if not self.bodies:
                found, expected = (
                    {name: a for name, a in d.items() if not name.startswith("body")}
                    for d in (found, expected)
                )
            self.comparisons += len(found)
            wrong = beyond_rounding(found, expected)
            assert not wrong, f"{layer=}: not what a fresh cache of the same tokens holds: {wrong}"
            coded = [
                {n: a for n, a in d.items() if n.startswith(("body", "stats"))}
                for d in (found, expected)
            ]
            self.equal.append(not differences(coded[0], coded[1]))
        self.fresh = dataclasses.replace(
            self.new, layers=tuple(layers), lengths=jnp.asarray(lengths)
        )

    def _with_intact(self, plan: LayerPlan, fresh: LayerState, state: LayerState) -> LayerState:
        """Return a fresh layer whose rows have the codes that a trim left beyond their bodies.
        These are compared with the fresh ones when they age again."""
        ends = np.array([plan.regions.aged_tokens(int(n)) for n in self.known.lengths])
        beyond = jnp.asarray(self.known.intact > ends)

        def pick(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(beyond.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

        body = jax.tree.map(pick, state.body, fresh.body)
        return dataclasses.replace(fresh, body=body, intact=jnp.asarray(self.known.intact))

    def _take_statistics(self, start: np.ndarray, counts: np.ndarray, prefill: bool) -> None:
        """Note the statistics of rows that get their first prompt, and those that grow with the
        tokens that come while nothing is quantized."""
        known, regions = self.known, self.plans[0].regions
        if not any(jax.tree.leaves(side) for side in self.initial):
            return
        ids, steps = self._window(start, CAPACITY), np.arange(CAPACITY)
        early = np.array(
            [
                [
                    regions.aged_tokens(int(n) if prefill else int(n + step)) == 0
                    and (n == 0 or known.intact[b] == 0)
                    for step in steps
                ]
                for b, n in enumerate(start)
            ]
        )
        early &= steps[None] < counts[:, None]
        first = (start == 0) & (counts > 0) & prefill
        for layer, plan in enumerate(self.plans):
            inputs = layer_inputs(layer, ids, start, counts)
            sides = zip(plan.codecs, by_side(self.params[layer]), known.stats[layer], strict=False)
            for codec, params, stats in sides:
                if not jax.tree.leaves(stats):
                    continue
                widens = codec.statistics.widens
                counted = early if widens else np.asarray(inputs.valid)
                tokens = dataclasses.replace(inputs, valid=jnp.asarray(counted))
                new = jax.tree.leaves(_statistics_of(codec, params, tokens))
                for stat, other in zip(jax.tree.leaves(stats), map(np.asarray, new), strict=True):
                    grown = early.any(axis=1) & ~first & widens
                    stat[grown] = np.maximum(stat, other)[grown]
                    stat[first] = other[first]

    def _near_exact(
        self,
        layer: int,
        inputs: kvq.types.LayerInputs,
        out: jax.Array,
        start: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        if self.exact is None:
            return
        held = layer_inputs(layer, self.known.ids, np.zeros(BATCH, np.int32), start + counts)
        real = np.asarray(inputs.valid)[:, None]
        errors = np.where(
            real, layer_runs.row_errors(np.asarray(out), exact_attention(inputs, held)), 0
        )
        self.comparisons += 1
        self.worst = max(self.worst, float(errors.max(initial=0)))
        row = int(np.argmax(errors.max(axis=(1, 2))))
        assert errors.max(initial=0) <= self.exact, (
            f"{layer=}: row {row} is off exact attention by {errors.max():.1e}"
        )

    # --- how

    def _say(self, counts: np.ndarray, *, prefill: bool = False) -> np.ndarray:
        """Give each row counts[b] tokens that nobody had. Return the lengths before."""
        start = self.known.lengths.copy()
        for b, n in enumerate(counts):
            self.known.ids[b, start[b] : start[b] + n] = (self.said + np.arange(n)) % WORDS
            self.said += int(n)
        self.known.lengths[:] = start + counts
        self._take_statistics(start, counts, prefill)
        self._age(start)
        return start

    def _age(self, start: np.ndarray) -> None:
        """Note the values from which blocks are quantized that leave the window unless their codes
        are intact."""
        known, regions = self.known, self.plans[0].regions
        for b in range(BATCH):
            known.intact[b] *= start[b] > 0
            whole = int(known.intact[b]) // regions.block * regions.block
            first, end = (regions.aged_tokens(int(n)) for n in (start[b], known.lengths[b]))
            new = slice(regions.sink + max(first, whole), regions.sink + max(end, whole))
            known.recoded[b, new] = known.returned[b, new]
            for sources, given in zip(known.sources, known.given, strict=True):
                for side, rows in enumerate(given):
                    sources[side][b, :, new] = rows[b, :, new]

    def _window(self, start: np.ndarray, tokens: int) -> np.ndarray:
        return np.take_along_axis(
            self.known.ids, np.minimum(start[:, None] + np.arange(tokens), CAPACITY - 1), axis=1
        )

    def _run(
        self, program: Callable, ids: np.ndarray, start: np.ndarray, counts: np.ndarray
    ) -> list[tuple[kvq.types.LayerInputs, jax.Array]]:
        """Run all layers. Return the inputs and the output of each."""
        layers, outputs, carry = [], [], ()
        for layer, (plan, state) in enumerate(zip(self.plans, self.cache.layers, strict=True)):
            inputs = layer_inputs(layer, ids, start, counts)
            out, state, carry = program(plan, self.params[layer], state, inputs, carry)
            layers.append(state)
            outputs.append((inputs, out))
        self.cache = dataclasses.replace(
            self.cache, layers=tuple(layers), lengths=jnp.asarray(start + counts, jnp.int32)
        )
        return outputs
