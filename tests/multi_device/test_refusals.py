"""The rule that picks a mesh for a cache, and meshes that are refused, each in one line."""

import re

import jax
import jax.numpy as jnp
import pytest

import kvq_jax as kvq
from kvq_hosts.served import check_on_one_device
from kvq_models import generate
from tests.multi_device.tiny_model import TOKENS, cache_of, model


def test_the_rule_splits_heads_first_and_tokens_for_the_rest():
    def chosen(spec: str, devices: int, heads: int = 8) -> str:
        dims = kvq.CacheDims(2, 2 * heads, heads, 32, 256)
        return str(kvq.Placement.choose(spec, dims, devices))

    assert chosen("kivi", 8) == "heads=8"
    assert chosen("kivi", 16) == "heads=8,tokens=2"
    assert chosen("kivi", 6) == "heads=2,tokens=3"
    assert chosen("kivi", 8, heads=3) == "tokens=8"
    assert chosen("xquant:latent=false", 8) == "tokens=8"
    assert chosen("nf4:group_size=64", 8) == "heads=4,tokens=2"
    assert chosen("kvquant:outliers=0.04", 8) == "tokens=8"
    assert chosen("kivi", 1) == "whole"
    assert chosen("fp8", 8) == "tokens=8"
    assert chosen("fp8:scale=head", 8) == "heads=8"


REFUSED = {
    "rows": (
        lambda: cache_of("rows=2", batch=3),
        "3 rows do not divide into 2 parts; give a batch of 2, 4, ...",
    ),
    "heads": (
        lambda: cache_of("heads=4"),
        "2 KV heads do not divide into 4 parts: heads can be 1, 2; tokens can be any number",
    ),
    "shared": (
        lambda: cache_of("heads=2", "xquant:latent=false,block=16"),
        "rows that all heads share: split tokens, not heads",
    ),
    "outliers": (
        lambda: cache_of("heads=2", "kvquant:outliers=0.1,block=16"),
        "stores arrays that heads share",
    ),
    "coupled": (
        lambda: cache_of("rows=2", "squat:shared_subspace=true,block=16"),
        "rows of a batch depend on each other",
    ),
    "coupled, rotated": (
        lambda: cache_of("rows=2", "squat:shared_subspace=true,rotate=true,block=16"),
        "rows of a batch depend on each other",
    ),
    "scale of all heads": (
        lambda: cache_of("heads=2", "fp8"),
        "heads depend on each other: split tokens, not heads",
    ),
    "devices": (
        lambda: kvq.Placement.parse("tokens=9"),
        "mesh 'tokens=9' needs 9 devices, and there are 8",
    ),
    "words": (lambda: kvq.Placement.parse("columns=2"), "write rows=R,heads=H,tokens=T"),
    "axis": (
        lambda: kvq.Placement(kvq.Placement.parse("heads=2").mesh, tokens="t"),
        "the mesh has no axis 't'; its axes are 'heads'",
    ),
    "twice": (
        lambda: kvq.Placement(kvq.Placement.parse("heads=2").mesh, rows="heads", tokens="heads"),
        "one mesh axis cannot split two things",
    ),
    "merge": (
        lambda: kvq.rows.merge(cache_of("heads=2"), cache_of("tokens=2")),
        "caches with different placement cannot be merged",
    ),
    "select": (
        lambda: kvq.rows.select(cache_of("rows=2"), [1]),
        "1 rows do not divide into 2 parts",
    ),
    "other mesh": (
        lambda: generate(model("heads=2"), cache_of("tokens=4"), TOKENS),
        "the model lies on another mesh than the cache",
    ),
    "no mesh": (
        lambda: generate(model(), cache_of("tokens=4"), TOKENS),
        "the cache lies on a mesh (tokens=4), and the model does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)) as found:
        call()
    assert "\n" not in str(found.value)


def test_a_hosts_model_on_several_devices_is_refused_in_one_line():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    for spec in (jax.P("x"), jax.P()):
        weights = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, spec))
        with pytest.raises(NotImplementedError, match=r"on 2 devices .* load it on one device"):
            check_on_one_device({"w": weights}, "tunix")
    check_on_one_device({"w": jnp.zeros(8), "name": "x"}, "tunix")
