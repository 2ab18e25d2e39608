"""Rows that a host pads on the left; methods that read more than an adapter gives are refused when
the cache is made."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_hosts.served import check_served, left_padded_lengths

DIMS = kvq.CacheDims(2, 4, 2, 32, 64)


def plans_of(spec: str) -> list[kvq.cache.CachePlan]:
    return [kvq.layer_plan(spec, DIMS, layer=i, capacity=64, dtype="float32") for i in range(2)]


@pytest.mark.parametrize("spec", ["dense", "kivi:bits=4", "squat:rank=3,lam=0.01"])
def test_methods_that_read_queries_keys_and_values_are_served(spec: str):
    check_served(plans_of(spec), "the host")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("kvquant", "'kvquant' needs parameters for k"),
        ("kvquant:skip_layers=0", "of layer 1"),
        ("kivi:pre_rope=true", "this method caches keys before RoPE and needs k_pre"),
        ("xquant", "'xquant' needs parameters for k"),
    ],
)
def test_others_are_refused_with_the_reason(spec: str, reason: str):
    with pytest.raises(ValueError, match=r"^the host gives a cache queries, keys") as caught:
        check_served(plans_of(spec), "the host")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


PADDED = [[0, 0, 1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1, 0], [0] * 8]


def test_a_row_begins_at_its_first_token_whatever_ids_come_after_it():
    visible = jnp.asarray(PADDED, bool)
    lengths = left_padded_lengths(visible)
    np.testing.assert_array_equal(lengths, [6, 8, 0])
    assert lengths.dtype == jnp.int32


def test_a_token_with_the_paddings_id_inside_a_prompt_is_read_and_shifts_nothing():
    plan, rng = plans_of("dense")[0], np.random.default_rng(0)
    q, k, v = (jnp.asarray(2 * rng.normal(size=(2, 8, n, 32)), jnp.float32) for n in (4, 2, 2))
    lengths = left_padded_lengths(jnp.asarray(PADDED[:2], bool))
    options = dict(lengths=lengths, prefill=True, padding="left")
    out, cache = plan.attend(plan.init(2), q, k, v, **options)
    np.testing.assert_array_equal(cache.lengths, [6, 8])
    for row, first in ((0, 2), (1, 0)):
        kept = (array[row : row + 1, first:] for array in (q, k, v))
        expected, _ = plan.attend(plan.init(1), *kept, prefill=True)
        np.testing.assert_allclose(out[row, first:], expected[0], atol=1e-5)
