"""Methods that read more than an adapter gives are refused when the cache is made."""

import pytest

import kvq_jax as kvq
from kvq_hosts.served import check_served

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
