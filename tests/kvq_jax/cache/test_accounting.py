"""Layouts and byte counts: what is promised is what is allocated."""

from __future__ import annotations

import jax
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from tests.methods_table import MethodCase, cases

DIMS = CacheDims(3, 4, 2, 32, 128)


@cases()
@pytest.mark.parametrize("capacity", [1, 16, 90])
def test_layout_is_what_is_allocated(case: MethodCase, capacity: int):
    for dtype in ("float32", "bfloat16"):
        promised = kvq.layout(case.spec, DIMS, 2, capacity, dtype)
        cache = kvq.init_cache(case.spec, DIMS, 2, capacity, dtype)
        assert jax.tree.structure(promised) == jax.tree.structure(cache)
        for (path, struct), leaf in zip(jax.tree_util.tree_leaves_with_path(promised), jax.tree.leaves(cache), strict=True):
            assert (struct.shape, struct.dtype) == (leaf.shape, leaf.dtype), jax.tree_util.keystr(path)
            assert leaf.shape[0] == 2, f"{jax.tree_util.keystr(path)} has no batch axis"
        assert kvq.nbytes(promised) == kvq.nbytes(cache) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


@cases()
def test_components_add_up_to_the_cache(case: MethodCase):
    cache = kvq.init_cache(case.spec, DIMS, 2, 90)
    parts = kvq.components(cache)
    assert sum(part.bytes for part in parts) == kvq.nbytes(cache)
    assert len({(part.side, part.name) for part in parts}) == len(parts), "a component is listed twice"
    for name in ("sink", "ring", "stats"):
        held = kvq.nbytes([getattr(layer, name) for layer in cache.layers])
        assert sum(part.bytes for part in parts if part.name == name) == held, name


@cases()
def test_no_buffer_is_shared(case: MethodCase):
    leaves = [leaf for leaf in jax.tree.leaves(kvq.init_cache(case.spec, DIMS, 2, 90)) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("dense", 16.0),
        ("kivi:bits=2", 3.0),  # a float16 scale and a zero for 32 elements: one more bit
        ("kivi:bits=4", 5.0),
        ("kivi:bits=3", 4.0),
        ("innerq:bits=2,mode=sym", 3.5),
        ("innerq:bits=2", 4.0),
        ("innerq:bits=2,mode=asym", 3.0),
        ("kivi:bits=2,scale_dtype=float32", 4.0),
    ],
)
def test_body_bits_are_codes_and_scales(spec: str, bits: float):
    for head_dim in (64, 128):
        assert kvq.body_bits_per_element(spec, CacheDims(2, 4, 2, head_dim, 4 * head_dim)) == bits


def test_windows_count_and_fade_with_the_context():
    dims = CacheDims(2, 8, 2, 128, 1024)
    short, long = (kvq.bits_per_element("kivi:bits=2", dims, s) for s in (1024, 65536))
    assert 3.0 < long < 3.1 < short
    assert kvq.bits_per_element("dense", dims, 65536) == pytest.approx(16, rel=1e-3)


def test_dense_bytes_are_those_of_a_plain_cache():
    assert kvq.dense_nbytes(CacheDims(2, 8, 2, 128, 1024), 3, 100) == 2 * 2 * 3 * 2 * 100 * 128 * 2
