"""Caches whose layers have sliding windows: their bytes, and every operation on them."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kvq_jax as kvq
from kvq_jax.cache.row_operations import _trim_layer
from kvq_jax.layer.attention import Attention
from kvq_models.inference.engine.pieces import RowPieces
from tests.kvq_jax.layer_runs import (
    CAPACITY,
    DIMS,
    ROUNDING,
    STEP,
    decode,
    parameters_of,
    prefill,
    quick_jit,
    row_errors,
)
from tests.kvq_jax.windowed_runs import empty, held_codes, tokens_with_sinks
from tests.methods_table import MethodCase, cases

SPEC, WINDOW, LONG = "kivi:bits=4,sink=4,recent=8,block=16", 24, 256
WINDOWED = dataclasses.replace(DIMS, attention=(Attention(window=WINDOW), Attention()))
LENGTHS = np.array([230, 200, 41, 3], np.int32)
trim_layer = quick_jit(_trim_layer, static_argnums=0)


@functools.partial(jax.jit, static_argnames=("tokens", "prompt"))
def taken(
    cache: kvq.cache.Cache, seed: Any, tokens: int, lengths: Any, prompt: bool
) -> tuple[jax.Array, kvq.cache.Cache]:
    """Return (attention of each layer, cache) after new tokens that are random by position."""
    step, outs = kvq.begin(cache, tokens, lengths, prefill=prompt), []
    positions = step.positions
    for layer in range(2):
        key = jax.random.fold_in(jax.random.key(seed), layer)

        def rows(heads: int, key=key) -> jax.Array:
            def one(row: Any, position: Any) -> jax.Array:
                of_row = jax.random.fold_in(jax.random.fold_in(key, row), position)
                return jax.random.normal(of_row, (heads, 32))

            of_rows = jnp.broadcast_to(jnp.arange(cache.batch)[:, None], positions.shape)
            return jnp.moveaxis(jax.vmap(jax.vmap(one))(of_rows, positions), 1, 2)

        both = rows(8)
        out, step = kvq.append_and_attend(step, both[:, :4], both[:, 4:6], both[:, 6:])
        outs.append(out)
    return jnp.stack(outs), kvq.finish(step)


@functools.cache
def filled() -> kvq.cache.Cache:
    """Return a cache with rows of LENGTHS tokens, whose first layer has a window. Shared."""
    cache = kvq.init_cache(SPEC, WINDOWED, 4, LONG, "float32")
    assert [plan.regions.wraps for plan in cache.plans] == [True, False]
    _, cache = taken(cache, 0, 224, np.minimum(LENGTHS, 224), True)
    _, cache = taken(cache, 0, 8, np.maximum(LENGTHS - 224, 0), False)
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    return cache


def equal_rows(
    one: kvq.cache.Cache, other: kvq.cache.Cache, rows: list[int], others: list[int]
) -> bool:
    return all(
        np.array_equal(np.asarray(a)[rows], np.asarray(b)[others])
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_bytes_follow_the_window():
    def layers(capacity: int) -> list[int]:
        layout = kvq.cache.layout(SPEC, WINDOWED, 1, capacity, "bfloat16")
        return [kvq.size.nbytes(layer) for layer in layout.layers]

    short, long = layers(4 * LONG), layers(64 * LONG)
    assert short[0] == long[0]
    assert long[1] > 15 * short[1]
    assert layers(WINDOW)[0] == layers(WINDOW)[1], "a window that holds all is none"
    assert kvq.size.nbytes(filled()) == kvq.size.nbytes(
        kvq.cache.layout(SPEC, WINDOWED, 4, LONG, "float32")
    )
    elements = kvq.size.of(SPEC, WINDOWED, 1, LONG).elements
    assert elements == 2 * DIMS.num_key_value_heads * DIMS.head_dim * (WINDOW + LONG)
    assert kvq.size.dense_nbytes(WINDOWED, 3, LONG) == 3 * 2 * elements


@cases("kivi2", "dense", "turboquant3", "xquant4", usual=("kivi2",))
def test_trimmed_rows_are_those_of_a_layer_that_keeps_all_tokens(case: MethodCase):
    """Twice: the second trim cuts in codes that the first one kept. Every row has lengths of its
    own."""
    tokens, n = tokens_with_sinks(), np.arange(8, dtype=np.int32)
    turns = ((60 + n, 60 - n // 2), (70 - n // 2, 68 - n), (72 - n, 72 - n), (84 - n, 84 - n))

    def history(slack: int) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
        plan, state = empty(case.spec, slack=slack)
        params, zero = parameters_of(plan), np.zeros(8, np.int32)
        _, state, _ = prefill(plan, params, state, tokens.window(zero, n + 50, CAPACITY), ())
        at, outs, codes = n + 50, [], []
        for stop, kept in turns:
            while (at < stop).any():
                inputs = tokens.window(at, stop, STEP)
                out, state, _ = decode(plan, params, state, inputs, ())
                outs.append(np.where(np.asarray(inputs.valid)[:, None, :, None], out, 0))
                at = np.minimum(at + STEP, np.maximum(stop, at)).astype(np.int32)
            codes.append(held_codes(plan, state, at))
            state, _ = trim_layer(plan, params, state, at, kept.astype(np.int32), None)
            at = kept.astype(np.int32)
        return outs, codes

    (outs, codes), (all_outs, all_codes) = history(STEP), history(10 * CAPACITY)
    for mine, theirs in zip(codes, all_codes, strict=True):
        assert mine.keys() == theirs.keys()
        assert not [key for key in mine if mine[key].tobytes() != theirs[key].tobytes()]
    for mine, theirs in zip(outs, all_outs, strict=True):
        real = np.abs(theirs).max(axis=3) > 0
        assert row_errors(mine, theirs)[real].max() <= ROUNDING
        assert row_errors(np.roll(mine, 1, axis=0), theirs)[real].max() > ROUNDING


def test_a_window_that_is_left_behind_cannot_come_back():
    cache = filled()
    for kept in (230 - 64, 0):
        assert kvq.rows.trim(cache, [kept, 999, 999, 1]).lengths.tolist() == [kept, 200, 41, 1]
    with pytest.raises(
        ValueError, match=r"row 1 has 200 tokens.*window of 24.*back to 1\d\d, not to 99"
    ) as caught:
        kvq.rows.trim(cache, [999, 99, 999, 999])
    minimum = int(str(caught.value).partition("back to ")[2][:3])
    assert kvq.rows.trim(cache, [999, minimum, 999, 999]).lengths[1] == minimum
    with pytest.raises(ValueError, match=f"not to {minimum - 1}"):
        kvq.rows.trim(cache, [999, minimum - 1, 999, 999])
    # what was lost before a trim is lost after it, although the row is shorter
    with pytest.raises(ValueError, match=f"has {minimum} tokens.*back to {minimum}, not"):
        kvq.rows.trim(kvq.rows.trim(cache, [999, minimum, 999, 999]), [999, minimum - 1, 999, 999])


def test_attention_after_a_traced_trim_that_goes_too_far_is_nan():
    trim = jax.jit(kvq.rows.trim)
    cache = trim(filled(), np.array([230 - 64, 100, 20, 3], np.int32))
    out, _ = taken(cache, 1, 1, np.ones(4, np.int32), False)
    nan = np.isnan(np.asarray(out)).any(axis=(2, 3, 4))
    np.testing.assert_array_equal(nan, [[False, True, False, False], [False] * 4])


def test_files_hold_windowed_caches(tmp_path):
    cache = kvq.rows.trim(filled(), [200, 190, 999, 999])
    assert np.asarray(cache.layers[0].floor).max() > 0
    path = tmp_path / "windowed.safetensors"
    kvq.files.save(cache, path)
    loaded = kvq.files.load(path, config=WINDOWED)
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert equal_rows(loaded, cache, [0, 1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="another dims"):
        kvq.files.load(path, config=DIMS)
    with safe_open(path, "numpy") as file:
        header, names = dict(file.metadata()), list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names}
    for changed, reason in (
        ({"attention": [{"window": -1}, {}]}, "dims="),
        ({"attention": [{"window": 24, "code": 1}, {}]}, "dims="),
        ({"attention": "all"}, "dims="),
        ({"attention": [{}]}, "1 entries for 2 layers"),
        ({"attention": [{"window": 25}, {}]}, "checksum"),
    ):
        dims = json.loads(header["dims"]) | changed
        save_file(tensors, path, header | {"dims": json.dumps(dims)})
        with pytest.raises(ValueError, match=reason):
            kvq.files.load(path)


def test_damage_to_a_windowed_layer_is_found():
    before = filled()
    _, after = taken(before, 0, 8, np.full(4, 8, np.int32), False)
    seals = kvq.files.seal(before)
    assert kvq.files.verify(after, seals) == ()
    for place, row, found in ((0, 0, True), (5, 0, False)):  # the last slot is for spare codes
        layer = after.layers[0]
        body = jax.tree.map(lambda a: np.array(a), layer.body)
        words = jax.tree.leaves(body[0])[0]
        entries = words.shape[2] // 6
        words[row, 0, (place + 1) * entries - 1, 0] ^= 1
        damaged = dataclasses.replace(
            after, layers=(dataclasses.replace(layer, body=body), after.layers[1])
        )
        assert bool(kvq.files.verify(damaged, seals)) == found, f"{place=}"


def test_pieces_of_a_prefix_hold_windowed_layers():
    row, pieces = kvq.init_cache(SPEC, WINDOWED, 1, LONG, "float32"), []
    cutter, logits = RowPieces(row, 7), jnp.zeros((1, 7))
    for before, length in ((0, 80), (80, 160), (160, 230)):
        _, row = taken(row, 0, 80, np.array([length - before], np.int32), True)
        pieces.append(cutter.cut(row, before, length, logits))
        assert cutter.fits(pieces[-1], before, length)
        assert equal_rows(cutter.joined(pieces), row, [0], [0])


def test_counts_of_windowed_layers_look_at_what_they_hold():
    assert kvq.size.overflowed(filled()) == ()
    layer = filled().layers[0]

    def overflowed_with(*places: tuple) -> list[tuple[int, int, str]]:
        leaves, tree = jax.tree.flatten(layer.body)
        scale = np.array(leaves[1])  # of keys
        for place in places:
            scale[place] = 0x7BFF  # the largest of float16
        leaves[1] = jnp.asarray(scale)
        damaged = dataclasses.replace(layer, body=jax.tree.unflatten(tree, leaves))
        cache = dataclasses.replace(filled(), layers=(damaged, filled().layers[1]))
        return [(one.row, one.layer, one.side) for one in kvq.size.overflowed(cache)]

    everywhere, spare = slice(None), slice(-1, None)
    assert overflowed_with((3,), (0, everywhere, spare)) == [], "an empty body, and spare codes"
    assert overflowed_with((0, everywhere, slice(1))) == [(0, 0, "k")]
