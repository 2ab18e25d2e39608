"""Objects print in a line, also while they are traced, after they were donated, and where nothing
is allocated."""

import html

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache import display
from kvq_models.inference.generation import Generated
from kvq_tools.evaluation.results import Evaluation
from tests.kvq_models.checkpoints import tiny_config

SPEC = "kivi:bits=2,recent=8,block=8"


@pytest.fixture(scope="module")
def cache():
    return kvq.init_cache(SPEC, tiny_config(), 2, 64)


def test_a_cache_tells_spec_rows_lengths_and_bytes(cache):
    size = f"{kvq.size.nbytes(cache) / 1024:.2f} KiB"
    told = f"Cache({kvq.parse(SPEC)}, rows 2, lengths [0, 0], of 64 tokens, in {size})"
    assert repr(cache) == told
    for part in ("<table>", "<th>spec</th>", f"<td>{size}</td>"):
        assert part in cache._repr_html_()
    many = kvq.cache.layout(SPEC, tiny_config(), 100, 64)
    assert "rows 100, lengths not allocated" in repr(many)


def test_a_plan_tells_spec_layer_and_attention():
    local = kvq.Attention(window=8, soft_cap=30.0)
    plan = kvq.layer_plan(SPEC, tiny_config(), layer=1, capacity=64, attention=local)
    assert repr(plan) == (
        f"CachePlan({kvq.parse(SPEC)}, layer 1, of 64 tokens, in bfloat16,"
        " attention window=8, soft_cap=30.0)"
    )


def test_a_traced_and_a_donated_cache_print_too(cache):
    seen = []

    def step(own):
        seen.append(repr(own))
        return jax.tree.map(lambda leaf: leaf, own)

    own = jax.tree.map(jnp.array, cache)
    jax.jit(step)(own)
    assert "lengths traced" in seen[0]
    own.lengths.delete()
    assert "lengths donated" in repr(own)
    assert "\n" not in repr(own)
    assert len(repr(jax.tree.map(lambda _: None, cache))) < 200, "any tree of this shape prints"


def test_generated_tokens_and_an_evaluation_print_in_a_line(cache):
    tokens, finite = jnp.zeros((2, 5), jnp.int32), jnp.ones(2, bool)
    out = Generated(tokens, jnp.asarray([5, 3]), cache, jnp.zeros((2, 5)), finite)
    assert repr(out) == f"Generated(tokens [5, 3], of at most 5, cache {cache!r})"
    assert "<td>[5, 3]</td>" in out._repr_html_()
    ones, where, agrees = np.ones(4), np.arange(4), np.array([True, True, True, False])
    spec = kvq.parse(SPEC)
    found = Evaluation(spec, "decode", 8, 0, where, where, ones, ones, ones / 8, agrees, None)
    wanted = (
        f"Evaluation({kvq.parse(SPEC)}, mode decode, tokens 4, perplexity 2.718, KL 0.12500, top-1"
        " agreement 75.00%)"
    )
    assert repr(found) == wanted
    assert "<td>75.00%</td>" in found._repr_html_()


def test_tables_escape_what_they_show():
    hostile = "<script>alert('&')</script>"
    table = display.table(hostile, {hostile: hostile})
    assert "<script" not in table
    assert table.count(html.escape(hostile)) == 3, "caption, label and fact"
