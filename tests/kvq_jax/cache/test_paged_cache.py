"""A body in pages holds the codes of a dense one, wherever its pages lie, and slots share pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.paged_cache import PagedCache, PagedPlan, paged_plan
from kvq_jax.layer.plan import LayerState
from tests.kvq_jax.cache.test_layer_cache import plan_of
from tests.kvq_jax.layer_runs import (
    DIMS,
    ROUNDING,
    differences,
    live,
    parameters_of,
    row_errors,
    sequences,
)
from tests.methods_table import METHOD_CASES, MethodCase, cases

PROMPT, REAL, STEP = 40, np.array([40, 27], np.int32), 24
PAGES = 40  # more than two slots have, so that most permutations move every block
SPEC = "kivi:bits=4,group_size=8,sink=3,recent=5,block=8"


def calls(rows: list[int], prompts: np.ndarray = REAL) -> list[dict[str, Any]]:
    """Return the arguments of two prompts, of several more tokens, and of one, for two rows of
    `sequences`."""
    tokens, steps = sequences().rows(rows), []
    start = np.zeros(2, np.int32)
    for new, count in ((prompts, PROMPT), (np.full(2, STEP), STEP), (np.ones(2, int), 1)):
        window = tokens.window(start, start + new, count, padding=0.0)
        names = dict(q=window.q_rot, k=window.k_rot, v=window.v, k_pre=window.k_pre)
        options = dict(x=window.x, rope=window.rope, lengths=new, prefill=not steps, layout="BNTH")
        steps.append(names | options)
        start = start + new.astype(np.int32)
    return steps


def real(out: jax.Array, lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(o[:, :n]) for o, n in zip(out, lengths, strict=True)], axis=1)


def state_of(plan: PagedPlan, cache: PagedCache, table: np.ndarray) -> LayerState:
    """Return the state that a dense cache with the same contents has."""
    layer = plan.plan.layer

    def dense(spec: Any, pages: jax.Array) -> jax.Array:
        axis = spec.axis("tokens")
        rows = np.moveaxis(np.asarray(pages)[table], 1, axis)
        return jnp.asarray(rows.reshape(*rows.shape[:axis], -1, *rows.shape[axis + 2 :]))

    body = tuple(
        jax.tree.map(dense, codec.body(1, 1, layer.regions.block), pages)
        for codec, pages in zip(layer.codecs, cache.pages, strict=True)
    )
    return dataclasses.replace(cache.slots.state, body=body)


def tables(plan: PagedPlan) -> list[np.ndarray]:
    """Return two tables without a page in common place."""
    first = np.random.default_rng(0).permutation(PAGES)[: 2 * plan.width].astype(np.int32)
    return [table.reshape(2, plan.width) for table in (first, (first + 7) % PAGES)]


ALL = tuple(case.id for case in METHOD_CASES)


# groups; a codebook after a rotation. The others run with --exhaustive
@cases(*ALL, usual=("kivi4_group8", "turboquant3"))
def test_pages_hold_what_dense_rows_hold(case: MethodCase):
    plan = plan_of(case.spec) if "xquant_cl" not in case.spec else None
    statistics = plan and [codec.statistics.spec(1, 2) for codec in plan.layer.codecs]
    if plan is None or jax.tree.leaves(statistics):
        pytest.skip("refused, see below")
    paged, parameters = paged_plan(plan), parameters_of(plan.layer)
    dense, lengths = plan.init(2), np.zeros(2, np.int32)
    caches = [paged.init(PAGES, 2) for _ in range(2)]
    steps = [step | dict(parameters=parameters) for step in calls([0, 1])[:2]]
    for arguments in steps:
        expected, dense = plan.attend(dense, **arguments, implementation="xla")
        new = arguments["lengths"]
        expected, lengths, outs = real(expected, new), lengths + new, []
        for i, table in enumerate(tables(paged)):
            out, caches[i] = paged.attend(caches[i], table, **arguments)
            outs.append(real(out, new))
            held = live(plan.layer, state_of(paged, caches[i], table), lengths)
            assert not differences(held, live(plan.layer, dense.state, lengths))
            assert caches[i].slots.lengths.tolist() == lengths.tolist()
        assert row_errors(outs[0], expected).max() <= ROUNDING
        assert np.array_equal(*outs), "the places of pages change attention"
    wrong = tables(paged)[0]
    wrong[1, 0] = wrong[0, 1]
    out, _ = paged.attend(caches[0], wrong, **steps[1])
    good, _ = paged.attend(caches[0], tables(paged)[0], **steps[1])
    assert np.array_equal(out[0], good[0]), "the slot with the right pages"
    assert row_errors(out[1], good[1]).max() > 100 * ROUNDING, "no table would be wrong"


def test_two_slots_share_the_pages_of_a_prompt():
    plan = plan_of(SPEC)
    paged = paged_plan(plan)
    prompt = calls([0, 0], np.array([PROMPT, PROMPT]))[0]
    dense = plan.attend(plan.init(2), **prompt, implementation="xla")[1]
    shared = paged.blocks(PROMPT)
    table = np.zeros((2, paged.width), np.int32)
    table[0] = np.arange(paged.width)
    table[1, shared:] = paged.width + np.arange(paged.width - shared)
    prompt["lengths"] = np.array([PROMPT, 0])
    _, cache = paged.attend(paged.init(PAGES, 2), table, **prompt)
    before = cache.pages
    table[1, :shared] = table[0, :shared]
    cache = paged.fork(cache, 0, 1)
    lengths = np.array([PROMPT, PROMPT])
    for arguments in calls([2, 3])[1:]:  # other tokens in each slot
        expected, dense = plan.attend(dense, **arguments, implementation="xla")
        out, cache = paged.attend(cache, table, **arguments)
        lengths = lengths + arguments["lengths"]
        assert row_errors(out, expected).max() <= ROUNDING
        held = live(plan.layer, state_of(paged, cache, table), lengths)
        assert not differences(held, live(plan.layer, dense.state, lengths))
    assert paged.blocks(int(lengths[0])) > shared > 0, "no slot writes a page of its own"
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache.pages), strict=True):
        assert np.array_equal(old[:shared], new[:shared]), "a shared page is written"
    k, v = paged.read(cache, table)
    for rows, expected in zip((k, v), plan.read(dense), strict=True):
        assert np.array_equal(rows[:, : lengths[0]], expected[:, : lengths[0]])
    assert not np.array_equal(k[0, PROMPT], k[1, PROMPT]), "slots with the same tokens"


def test_a_prompt_is_read_into_its_slot_alone():
    """As an engine does whose other slots decode."""
    plan = plan_of(SPEC)
    paged, prompts = paged_plan(plan), calls([0, 1])[0]
    table = tables(paged)[0]
    whole = paged.attend(paged.init(PAGES, 2), table, **prompts)[1]
    cache = empty = paged.init(PAGES, 2)
    for slot in range(2):
        row = slice(slot, slot + 1)
        one = dataclasses.replace(cache, slots=jax.tree.map(lambda a, r=row: a[r], cache.slots))
        arrays = {n: prompts[n][row] for n in ("q", "k", "v", "lengths")}
        _, one = paged.attend(one, table[row], **arrays, prefill=True, layout="BNTH")
        slots = jax.tree.map(lambda a, b, r=row: a.at[r].set(b), cache.slots, one.slots)
        cache = dataclasses.replace(one, slots=slots)
    states = (
        live(plan.layer, state_of(paged, filled, table), REAL) for filled in (cache, whole, empty)
    )
    found, expected, nothing = states
    assert not differences(found, expected)
    assert differences(nothing, expected), "a cache without tokens would pass"
    assert cache.slots.lengths.tolist() == whole.slots.lengths.tolist() == REAL.tolist()


def test_bytes_of_pages_and_slots_are_those_of_the_arrays():
    paged = paged_plan(plan_of(SPEC))
    cache = paged.init(PAGES, 2)
    assert kvq.size.nbytes(cache) == PAGES * paged.page_bytes + 2 * paged.slot_bytes
    assert paged.page_tokens == 8
    usual = kvq.layer_plan("kivi:bits=4", DIMS, layer=1, capacity=4096, dtype="float32")
    assert paged_plan(usual).page_tokens == 32


def test_what_pages_do_not_serve_is_refused():
    with pytest.raises(NotImplementedError, match="takes statistics from each prompt"):
        paged_plan(plan_of("innerq:sink=4,recent=8,block=16"))
    window = kvq.Attention(window=8)
    with pytest.raises(NotImplementedError, match="newest blocks of a window of 8"):
        paged_plan(
            kvq.layer_plan("kivi", DIMS, layer=0, capacity=2048, dtype="float32", attention=window)
        )
    placement = kvq.Placement(jax.make_mesh((1,), ("kv",)), heads="kv")
    with pytest.raises(NotImplementedError, match="is placed on a mesh: kvq"):
        paged_plan(plan_of(SPEC, placement=placement))
    paged, arrays = paged_plan(plan_of(SPEC)), calls([0, 1])[1]
    cache = paged.init(4, 2)
    with pytest.raises(ValueError, match=rf"table must be \[2, {paged.width}\], got \[2, 3\]"):
        paged.attend(cache, np.zeros((2, 3), int), **arrays)
    table = 4 * np.eye(2, paged.width, dtype=int)
    with pytest.raises(ValueError, match="pages from 0 to 4, but the cache has pages 0 to 3"):
        paged.attend(cache, table, **arrays)
    for slots, message in (((2, 0), "source=2"), ((0, -1), "target=-1")):
        with pytest.raises(ValueError, match=f"{message}, but the cache has slots 0 to 1"):
            paged.fork(cache, *slots)
