"""docs/own_model.md: what the page's code computes, run as it stands, against plain attention."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from tests.kvq_jax.layer_runs import row_errors

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "own_model.md"
QUANTIZED = (
    "kivi:bits=4,recent=32",
    "innerq:bits=3,recent=32",
    "kvquant:bits=4,outliers=0.05",
    "xquant:bits=4",
)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Everything that the page's code blocks define, one after the other."""
    names: dict[str, Any] = {}
    for block in re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
    ):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def plain(page: dict[str, Any]) -> np.ndarray:
    """Return the logits [B, T, V] of the continuation by causal attention over whole sequences,
    without a cache."""
    model, rows = page["model"], []

    @jax.jit
    def logits(tokens):
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        causal = jnp.tril(jnp.ones((tokens.shape[0], tokens.shape[0]), bool))
        h = model["embed"][tokens][None]
        for w in model["layers"]:
            x = page["norm"](h)
            q, k, v = (
                page["split"](x @ w[name], count) for name, count in (("q", 8), ("k", 2), ("v", 2))
            )
            q, k = (kvq.types.rotate(a, positions, page["ROPE"]) for a in (q, k))
            k, v = (jnp.repeat(a, 4, axis=1) for a in (k, v))
            scores = jnp.where(
                causal[None, None], jnp.einsum("bnth,bnsh->bnts", q, k) * 32**-0.5, -jnp.inf
            )
            out = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), v)
            h = h + out.swapaxes(1, 2).reshape(1, -1, 256) @ w["o"]
            h = h + jax.nn.silu(page["norm"](h) @ w["up"]) @ w["down"]
        return (page["norm"](h) @ model["embed"].T)[0]

    for prompt, length, continuation in zip(
        page["prompts"], page["lengths"].tolist(), page["continuation"], strict=True
    ):
        rows.append(logits(jnp.concatenate([prompt[:length], continuation]))[length:])
    return np.stack(rows)


def test_a_layers_cache_attends_as_the_models_own_attention(page: dict[str, Any]):
    exact = np.asarray(page["attention"](page["q"], page["k"], page["v"]))
    assert row_errors(page["prompt"], exact[:, :79]).max() < 1e-5
    assert row_errors(page["prompt_of_your_own"], exact[:, :79]).max() < 1e-5
    token = np.asarray(page["token"])
    assert 1e-3 < np.median(row_errors(token, exact[:, 79:])) < 0.1
    assert np.median(row_errors(token, exact[:, 78:79])) > 0.3, "another token's would pass"
    for name in ("token_after_append", "token_on_mesh"):
        assert row_errors(page[name], token).max() < 1e-5, name
    np.testing.assert_array_equal(page["out"][0], token[0], "the row without padding differs")
    assert row_errors(page["out"][1], token[1]).max() > 1e-2, "the padded row has fewer tokens"
    assert page["left"].lengths.tolist() == [80, 51]
    assert page["positions"][:, -1].tolist() == [78, 49]
    assert page["keys"].shape == (2, 256, 2, 32)


def test_windows_caps_and_sinks_are_those_of_the_definition(page: dict[str, Any]):
    q, k, v = (page[name] for name in ("q", "k", "v"))
    seen = jnp.arange(80)[None] > 79 - 32
    products = jnp.einsum("bnh,bsnh->bns", q[:, 79], jnp.repeat(k, 2, axis=2))
    logits = 30 * jnp.tanh(0.2 * products / 30)
    logits = jnp.where(seen[None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.pad(logits, ((0, 0), (0, 0), (0, 1))), axis=-1)
    weights = jnp.exp(logits - lse[..., None])
    exact = jnp.einsum("bns,bsnh->bnh", weights, jnp.repeat(v, 2, axis=2))
    assert row_errors(page["token_in_window"][:, 0], exact).max() < 1e-5, "the window is exact"
    np.testing.assert_allclose(page["lse"][:, 0], lse, atol=1e-5)
    assert row_errors(page["token"][:, 0], exact).min() > 0.05, "plain attention would pass"


def test_a_dict_and_a_scan_of_layers_are_the_same_model(page: dict[str, Any]):
    plan, h = page["plan"], page["h"]
    plans = dict.fromkeys(page["plans"], plan)
    weights = page["layer_weights"]
    caches = {name: plan.init(2) for name in plans}
    _, caches = page["through_dict"](plans, weights, caches, h[:, :79], prefill=True)
    expected, _ = page["through_dict"](plans, weights, caches, h[:, 79:], prefill=False)
    assert row_errors(page["by_scan"], expected).max() < 1e-5
    assert row_errors(page["by_dict"], expected).max() > 1e-4, "its first layer is exact"
    assert np.median(row_errors(page["by_dict"], expected)) < 0.1


def test_the_exact_cache_gives_what_plain_attention_gives(page: dict[str, Any], plain: np.ndarray):
    logits, cache = page["results"]["dense"]
    assert row_errors(logits, plain).max() < 1e-5
    assert np.median(row_errors(logits[:, 1:], plain[:, :-1])) > 0.1, (
        "logits of the token before would pass"
    )
    assert np.asarray(cache.lengths).tolist() == [200, 137]


@pytest.mark.parametrize("spec", QUANTIZED)
def test_quantized_caches_are_close_and_smaller(page: dict[str, Any], plain: np.ndarray, spec: str):
    (logits, cache), dense = page["results"][spec], page["results"]["dense"][1]
    assert 1e-3 < page["divergence"](logits, plain) < 0.03
    assert page["divergence"](logits[:, 1:], plain[:, :-1]) > 0.3, (
        "predictions of the token before would pass"
    )
    assert kvq.size.nbytes(cache) < 0.65 * kvq.size.nbytes(dense)
    assert np.asarray(cache.lengths).tolist() == [200, 137]


def test_the_page_names_every_method_that_reads_more_than_queries_keys_and_values():
    table = PAGE.read_text().partition("## What a method reads")[2].partition("## ")[0]
    named = set(re.findall(r"`([a-z_]+)", table))
    codecs = {
        name: kvq.cache.layout(name, kvq.CacheDims(4, 4, 2, 64, 256), 1, 256).plans[-1].k
        for name in kvq.methods.METHODS
    }
    more = {
        name
        for name, codec in codecs.items()
        if codec.facts.form == "before_rope"
        or codec.facts.rebuilds
        or codec.learning.parameters(heads=1)
    }
    assert {"kvquant", "squat_pre", "xquant_cl"} <= more <= named
    assert {"kivi", "polarquant", "int4"}.isdisjoint(more), (
        "methods that read nothing else would have to be named"
    )
