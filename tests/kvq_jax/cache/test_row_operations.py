"""Cache algebra: trimmed, picked, repeated and merged rows are the rows that were there, and
decoding goes on from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from tests.kvq_jax.cache_runs import DIMS, LENGTHS, continued, filled, rows_of, trim
from tests.kvq_jax.layer_runs import ROUNDING, row_errors
from tests.methods_table import MethodCase, cases


def assert_same_rows(
    found: kvq.cache.Cache,
    expected: kvq.cache.Cache,
    found_rows: list[int],
    expected_rows: list[int],
) -> None:
    """Bitwise: rows `found_rows` of one cache are rows `expected_rows` of the other, in every
    leaf."""
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(one)[found_rows],
            np.asarray(other)[expected_rows],
            err_msg=jax.tree_util.keystr(path),
        )


@cases()
def test_trim_keeps_what_the_remaining_tokens_stood_for(case: MethodCase):
    cache = filled(case.spec)
    kept = np.array([90, 89, 85, 60, 37, 17, 3, 0], np.int32)  # of rows with 90 tokens each
    short = trim(cache, kept)
    np.testing.assert_array_equal(short.lengths, kept)
    assert jax.tree.structure(short) == jax.tree.structure(cache)
    alive = (np.arange(cache.capacity) < kept[:, None])[:, None]
    for layer, sides in enumerate(zip(rows_of(cache), rows_of(short), strict=True)):
        for side, (before, after) in enumerate(zip(*sides, strict=True)):
            where, real = f"{layer=} {side=}", np.broadcast_to(alive, before.shape[:3])
            assert row_errors(after, before)[real].max() <= ROUNDING, where
            assert not after[~real].any(), f"{where}: a trimmed token is read"
            shifted = row_errors(after, np.roll(before, 1, axis=2))[real]
            assert shifted.max() > 1e-2, f"{where}: rows of the token before would pass"


@cases("dense", "innerq2", "kvquant4", "zipcache42")  # two sides, statistics, outliers, joint rows
def test_a_trimmed_cache_decodes_like_its_reference(case: MethodCase):
    cache = filled(case.spec)
    kept = np.array([90, 80, 75, 60, 37, 17, 3, 0], np.int32)
    out, want = continued(trim(cache, kept), np.minimum(kept + 8, 90), seed=7)
    decoded = np.isfinite(want)[..., 0]
    error = row_errors(out, want)[decoded].max()
    assert error <= 1e-5, f"relative error {error:.1e}"


def test_a_row_trimmed_to_nothing_is_as_new():
    cache = filled("innerq:sink=4,recent=8,block=16")

    def learned(cache: kvq.cache.Cache) -> list[np.ndarray]:
        return [np.asarray(stat) for layer in cache.layers for stat in jax.tree.leaves(layer.stats)]

    assert any((stat != 1).any() for stat in learned(cache))
    for stat in learned(trim(cache, np.zeros(8, np.int32))):
        np.testing.assert_array_equal(stat, 1)


def test_trim_never_lengthens_a_row():
    cache = filled("kivi:sink=0,recent=12,block=16", LENGTHS)
    found = trim(cache, np.full(8, 1000, np.int32))
    np.testing.assert_array_equal(found.lengths, cache.lengths)
    assert_same_rows(found, cache, list(range(8)), list(range(8)))


@cases("innerq2")
def test_rows_are_selected_reordered_and_repeated(case: MethodCase):
    cache = filled(case.spec, LENGTHS)
    assert_same_rows(kvq.rows.select(cache, [5, 2, 2]), cache, [0, 1, 2], [5, 2, 2])
    turned = jax.jit(kvq.rows.select)(cache, jnp.arange(8)[::-1])
    assert_same_rows(turned, cache, list(range(8)), list(range(8))[::-1])
    twice = kvq.rows.repeat(cache, 2)
    assert twice.batch == 16
    assert_same_rows(twice, cache, list(range(16)), [i // 2 for i in range(16)])
    with pytest.raises(AssertionError):
        assert_same_rows(kvq.rows.select(cache, [5, 2, 2]), cache, [0, 1, 2], [5, 2, 3])


@cases("innerq2")
def test_merged_rows_are_those_of_both_caches(case: MethodCase):
    first, second = filled(case.spec, LENGTHS), kvq.rows.select(filled(case.spec), [1, 3])
    merged = kvq.rows.merge(first, second)
    assert_same_rows(merged, first, list(range(8)), list(range(8)))
    assert_same_rows(merged, second, [8, 9], [0, 1])
    assert jax.tree.structure(merged) == jax.tree.structure(first)


@cases("innerq2")
def test_a_row_replaces_another_and_nothing_else(case: MethodCase):
    cache, other = filled(case.spec, LENGTHS), kvq.rows.select(filled(case.spec), [3])
    replace = jax.jit(lambda cache, index, row: kvq.rows.replace(cache, index, row))
    for index in (0, 5, 7):
        found = replace(cache, jnp.int32(index), other)
        kept = [row for row in range(8) if row != index]
        assert_same_rows(found, other, [index], [0])
        assert_same_rows(found, cache, kept, kept)
        with pytest.raises(AssertionError):
            assert_same_rows(found, cache, [index], [index])
    assert replace._cache_size() == 1, "one program serves every row"


def test_a_donated_cache_is_written_one_row_at_a_time():
    cache = kvq.cache.layout("kivi:bits=2", DIMS, 64, 4096)
    row = kvq.cache.layout("kivi:bits=2", DIMS, 1, 4096)
    replace = jax.jit(kvq.rows.replace, donate_argnums=0)
    lowered = replace.lower(cache, jax.ShapeDtypeStruct((), jnp.int32), row)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * kvq.size.nbytes(cache), (
        "the donated cache is not updated in place"
    )
    assert memory.temp_size_in_bytes <= kvq.size.nbytes(row), (
        f"{memory.temp_size_in_bytes} temporary bytes for a row of {kvq.size.nbytes(row)}"
    )


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("spec", {"spec": "kivi:bits=4,sink=0,recent=12,block=16"}),
        ("capacity", {"capacity": 91}),
        ("dtype", {"dtype": "bfloat16"}),
        ("dims", {"dims": dataclasses.replace(DIMS, num_hidden_layers=3)}),
    ],
)
def test_caches_that_differ_share_no_rows(field: str, other: dict):
    cache = filled("kivi:sink=0,recent=12,block=16", LENGTHS)
    fields = ("spec", "dims", "capacity", "dtype")
    given = {name: getattr(cache, name) for name in fields} | other
    changed = kvq.init_cache(given["spec"], given["dims"], 1, given["capacity"], given["dtype"])
    for operation in (kvq.rows.merge, lambda cache, row: kvq.rows.replace(cache, 0, row)):
        with pytest.raises(ValueError, match=rf"\Acaches with different {field} [^\n]+\Z"):
            operation(cache, changed)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: kvq.rows.select(c, [8]), "row 8"),
        (lambda c: kvq.rows.select(c, [-1]), "row -1"),
        (lambda c: kvq.rows.select(c, []), "vector of row numbers"),
        (lambda c: kvq.rows.select(c, [[0]]), "vector of row numbers"),
        (lambda c: kvq.rows.select(c, [0.5]), "index must be integers, got 0.5"),
        (lambda c: kvq.rows.repeat(c, 0), "repeats=0"),
        (lambda c: kvq.rows.trim(c, [1, 2]), r"lengths must be \[8\]"),
        (lambda c: kvq.rows.trim(c, [1] * 8, ((),)), "an entry for each of the 2 layers, got 1"),
        (
            lambda c: kvq.rows.replace(c, 8, kvq.rows.select(c, [0])),
            "index=8, but the cache has rows 0 to 7",
        ),
        (lambda c: kvq.rows.replace(c, -1, kvq.rows.select(c, [0])), "index=-1"),
        (lambda c: kvq.rows.replace(c, 0, kvq.rows.select(c, [0, 1])), "got a cache of 2 rows"),
        (lambda c: kvq.rows.replace(c, [0], kvq.rows.select(c, [0])), r"an index of shape \(1,\)"),
    ],
)
def test_arguments_that_name_no_rows_are_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(filled("dense:sink=2,recent=5,block=8"))
