"""Layers of Flax Linen with a quantized cache, under `nn.scan`, beside Linen's own cache."""

import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen", reason="flax is not installed")
serialization = pytest.importorskip("flax.serialization")

import kvq_jax as kvq  # noqa: E402
from kvq_hosts import linen  # noqa: E402
from kvq_hosts.linen import cached_attention  # noqa: E402
from tests.kvq_jax.layer_runs import row_errors  # noqa: E402

LAYERS, HEADS, WIDTH, TOKENS, CAPACITY = 2, 2, 64, 12, 16


def plan_of(spec: str) -> kvq.cache.CachePlan:
    dims = kvq.CacheDims(LAYERS, HEADS, HEADS, WIDTH // HEADS, WIDTH)
    return kvq.layer_plan(spec, dims, layer=0, capacity=CAPACITY, dtype="float32")


class Block(nn.Module):
    """A layer with a quantized cache, or with Linen's own if there is no plan."""

    plan: kvq.cache.CachePlan | None

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        own = dict(decode=True)
        if self.plan is not None:
            own = dict(attention_fn=cached_attention(self, self.plan, prefill=x.shape[1] > 1))
        attention = nn.MultiHeadDotProductAttention(HEADS, **own, name="attention")
        return x + attention(x), None


class Model(nn.Module):
    plan: kvq.cache.CachePlan | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes = {"params": 0, "cache": 0}
        layers = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        return layers(self.plan, name="layers")(x, None)[0]


@pytest.fixture(scope="module")
def inputs() -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))


@pytest.fixture(scope="module")
def linens_own(inputs: jax.Array) -> tuple[Any, np.ndarray]:
    """Return (params, outputs of all tokens one by one) of the model with Linen's cache."""
    model = Model()
    empty = jnp.zeros((2, CAPACITY, WIDTH))
    variables = model.init(jax.random.key(1), empty)
    params, cache = variables["params"], variables["cache"]
    with jax.numpy_rank_promotion("allow"):  # Linen's bias
        step = jax.jit(lambda c, x: model.apply({"params": params, "cache": c}, x, mutable="cache"))
        outs = []
        for t in range(TOKENS):
            out, cache = step(cache, inputs[:, t : t + 1])
            cache = cache["cache"]
            outs.append(out)
    return params, np.concatenate(outs, axis=1)


def generated(spec: str, params: Any, inputs: jax.Array, prompt: int) -> tuple[np.ndarray, Any]:
    """Return the outputs of all tokens, of which the first ones come as a prompt, and the cache."""
    model = Model(plan_of(spec))
    cache = model.init(jax.random.key(1), inputs[:, :1])["cache"]
    with jax.numpy_rank_promotion("allow"):
        run = jax.jit(lambda c, x: model.apply({"params": params, "cache": c}, x, mutable="cache"))
        outs = []
        for t in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, TOKENS))):
            out, cache = run(cache, inputs[:, t])
            cache = cache["cache"]
            outs.append(out)
    return np.concatenate(outs, axis=1), cache


def test_scanned_layers_equal_linens_own_cache(inputs: jax.Array, linens_own: Any):
    params, expected = linens_own
    out, cache = generated("dense", params, inputs, prompt=8)
    assert row_errors(out, expected).max() < 1e-5
    kept = cache["layers"]["layer"]
    assert isinstance(kept, kvq.cache.LayerCache)
    assert kept.lengths.tolist() == [[TOKENS] * 2] * LAYERS
    coarse, _ = generated("int2:sink=0,recent=0,block=4", params, inputs, prompt=8)
    assert row_errors(coarse, expected).max() > 1e-2, "the cache is not read"


def test_the_module_of_the_documentation_runs():
    (snippet,) = re.findall(r"^    class .*?(?=^The)", linen.__doc__, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"nn": nn, "kvq": kvq, "cached_attention": cached_attention}
    exec(textwrap.dedent(snippet), names | {"__name__": __name__}, names)
    dims = kvq.CacheDims(1, 8, 8, WIDTH // 8, WIDTH)
    block = names["Block"](kvq.layer_plan("dense", dims, layer=0, capacity=16, dtype="float32"))
    x = jnp.ones((2, 3, WIDTH))
    with jax.numpy_rank_promotion("allow"):
        variables = block.init(jax.random.key(0), x, True)
        out, after = block.apply(variables, x, True, mutable=["cache"])
    assert out.shape == x.shape
    assert after["cache"]["layer"].lengths.tolist() == [3, 3]
    assert variables["cache"]["layer"].lengths.tolist() == [0, 0], "initialization adds nothing"


def test_what_linen_would_drop_in_silence_is_refused(inputs: jax.Array):
    class Masked(nn.Module):
        rate: float = 0.0

        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            attend = cached_attention(self, plan_of("dense"), prefill=True)
            attention = nn.MultiHeadDotProductAttention(
                HEADS, attention_fn=attend, dropout_rate=self.rate, deterministic=False
            )
            return attention(x, mask=mask)

    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    padding = nn.make_attention_mask(jnp.arange(TOKENS) < 5, jnp.arange(TOKENS) < 5)
    with jax.numpy_rank_promotion("allow"):
        with pytest.raises(ValueError, match="takes no mask: give padding as `lengths`"):
            Masked().init(keys, inputs, padding[None])
        with pytest.raises(ValueError, match="no dropout: call with deterministic=True"):
            Masked(0.5).init(keys, inputs)
        Masked().init(keys, inputs)


def test_log_sums_which_linen_has_no_place_for_are_refused():
    with pytest.raises(ValueError, match="returns attention alone: leave lse=True out"):
        cached_attention(nn.Module(), plan_of("dense"), prefill=True, lse=True)
    cached_attention(nn.Module(), plan_of("dense"), prefill=True, lse=False)


def test_flax_writes_and_reads_the_caches_of_a_model(inputs: jax.Array):
    model = Model(plan_of("kivi:bits=4,recent=4,block=4,group_size=4"))
    variables = model.init(jax.random.key(1), inputs[:, :1])
    _, changed = model.apply(variables, inputs, mutable=["cache"])
    written = serialization.to_bytes(changed)
    read = serialization.from_bytes({"cache": variables["cache"]}, written)
    assert jax.tree.structure(read) == jax.tree.structure(changed)
    jax.tree.map(np.testing.assert_array_equal, read, changed)
    lengths = jax.tree.leaves(read)[-1]
    assert (lengths == TOKENS).all(), "the empty cache would pass"
    other = Model(plan_of("kivi:bits=2,recent=4,block=4,group_size=4"))
    empty = other.init(jax.random.key(1), inputs[:, :1])["cache"]
    with pytest.raises(ValueError, match="of the cache of another plan or batch"):
        serialization.from_bytes({"cache": empty}, written)
