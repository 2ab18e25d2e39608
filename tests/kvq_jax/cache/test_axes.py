"""Every array of every cache is described by named axes, and the names are right: what grows with
tokens is called so, and nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.cache import CacheDims
from kvq_jax.codecs.bias_subtracting import BiasSubtracting
from kvq_jax.codecs.codec import Codec
from kvq_jax.layer.plan import LayerPlan
from kvq_jax.types.array_types import ArraySpec, Axis, AxisName, LayerWeights
from tests.kvq_jax import layer_runs
from tests.kvq_jax.origins import prompt
from tests.methods_table import MethodCase, cases

DIMS = CacheDims(3, 4, 2, 32, 128)
CAPACITY = 90


def described(tree: Any) -> dict[str, ArraySpec]:
    return {
        jax.tree_util.keystr(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(tree)
    }


def misnamed(one: Any, other: Any, name: AxisName) -> list[str]:
    """Arrays of two trees that differ in length along another axis than the one that `one`'s
    descriptions call `name`, or not along it. `other` holds descriptions, structs or arrays."""
    found = []
    for (path, spec), more in zip(described(one).items(), jax.tree.leaves(other), strict=True):
        differing = [
            i for i, (a, b) in enumerate(zip(spec.shape, more.shape, strict=True)) if a != b
        ]
        if differing != [i for i, own in enumerate(spec.names) if own == name] or not differing:
            found.append(f"{path} {spec.names}: {spec.shape} and {more.shape}")
    return found


def last_plan(case: MethodCase) -> LayerPlan:
    """Return the last layer: in a cross-layer method, one that may build on another."""
    return kvq.cache.layout(case.spec, DIMS, 2, CAPACITY, "float32").plans[-1]


@cases()
def test_the_batch_and_the_tokens_of_a_body_are_called_so(case: MethodCase):
    one, wider, longer = (
        kvq.cache.axes(case.spec, DIMS, b, s)
        for b, s in ((2, CAPACITY), (3, CAPACITY), (2, 3 * CAPACITY))
    )
    assert not misnamed(one, wider, "batch")
    bodies = [[layer.body for layer in cache.layers] for cache in (one, longer)]
    assert not misnamed(*bodies, "tokens")
    windows = [
        [(layer.sink, layer.ring, layer.stats) for layer in cache.layers] for cache in (one, longer)
    ]
    shapes = [[spec.shape for spec in jax.tree.leaves(of_cache)] for of_cache in windows]
    assert shapes[0] == shapes[1], "windows grew"
    for path, spec in described(bodies[0]).items():
        assert spec["tokens"].count == last_plan(case).regions.body_capacity, (
            f"{path} does not run along the body's tokens"
        )
        assert spec["tokens"].count % spec["tokens"].per == 0, f"{path} ends inside of an entry"
    for sink, ring in ((layer.sink, layer.ring) for layer in one.layers):
        assert all(spec.names[2] == "tokens" for spec in (*sink, *ring))


@cases("kivi2", "innerq2", "nf4_two_heads", "kvquant4", "polar44", "xquant_cl2")
def test_another_name_for_the_tokens_is_noticed(case: MethodCase):
    one, longer = (
        [layer.body for layer in kvq.cache.axes(case.spec, DIMS, 2, s).layers]
        for s in (CAPACITY, 3 * CAPACITY)
    )
    assert not misnamed(one, longer, "tokens")
    for *renamed, told in (
        (("batch", "mlp"), ("tokens", "batch"), "tokens may be called batch"),
        (("none", "mlp"), ("tokens", "none"), "tokens may be called none"),
        (("tokens", "mlp"), ("batch", "tokens"), ("mlp", "batch"), "the batch passes for tokens"),
    ):
        wrong = one
        for old, new in renamed:
            wrong = jax.tree.map(lambda spec, old=old, new=new: spec.renamed(old, new), wrong)
        assert len(misnamed(wrong, longer, "tokens")) == len(jax.tree.leaves(one)), told


@cases()
def test_codecs_make_what_they_describe(case: MethodCase):
    """Rows, statistics, bodies of one and of two blocks and accumulators, as the codec's own
    functions make them."""
    plan, batch = last_plan(case), 2
    text = layer_runs.sequences(batch, dataclasses.replace(DIMS, hidden_size=128))
    whole = np.full(batch, CAPACITY, np.int32)
    inputs = dataclasses.replace(
        text.window(np.zeros(batch, np.int32), whole, CAPACITY), residual=jnp.asarray(text.x)
    )
    params = layer_runs.parameters_of(plan) or ((), ())
    for own, codec in zip(params, plan.codecs, strict=False):
        heads, channels = (axis.size for axis in codec.facts.row_axes(plan.heads, plan.head_dim))
        made = jax.eval_shape(codec.rows, own, inputs)
        assert made.shape == (batch, heads, CAPACITY, channels)
        statistics = codec.statistics
        stats = jax.eval_shape(lambda own, inputs, s=statistics: s.of(own, inputs), own, inputs)
        specs = statistics.spec(batch, plan.heads)
        assert jax.tree.map(lambda spec: spec.struct, specs) == stats
        assert jax.eval_shape(lambda s=statistics: s.initial(batch, plan.heads)) == stats
        one, two = (
            coded(codec, own, stats, (batch, heads, n * plan.regions.block, channels))
            for n in (1, 2)
        )
        body = codec.body(batch, plan.heads, plan.regions.block)
        for (path, spec), struct in zip(described(body).items(), jax.tree.leaves(one), strict=True):
            assert (spec.shape, spec.dtype) == (struct.shape, struct.dtype.name), path
        assert not misnamed(body, two, "tokens")
        if cross := codec.facts.cross_layer:
            spec = cross.accumulator(batch, CAPACITY)
            held = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
            rows = jax.ShapeDtypeStruct(made.shape, jnp.float32)
            assert jax.eval_shape(cross.expected, own, held).shape == rows.shape
            assert jax.eval_shape(cross.accumulated, own, held, rows).shape == spec.shape


def coded(codec: Codec, params: Any, stats: Any, shape: tuple[int, ...]) -> Any:
    """Return the structs of the body that rows of this shape are quantized to."""
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(
        lambda p, s, rows: codec.quantize(p, s, rows, prompt(rows)), params, stats, rows
    )


@cases(every=True)
def test_parameters_are_what_is_described(case: MethodCase):
    plan = last_plan(case)
    params = layer_runs.parameters_of(plan) or ((), ())
    from_weights = plan.from_weights(described_weights(plan))
    for own, made, codec in zip(params, from_weights, (plan.k, plan.v), strict=True):
        learning = codec.learning
        calibrated = learning.carried(plan.heads) | learning.derived(plan.heads)
        promised = {**(made or {}), **calibrated}
        assert jax.tree.structure(promised) == jax.tree.structure(own or {})
        for (path, spec), array in zip(
            described(promised).items(), jax.tree.leaves(own), strict=True
        ):
            assert (spec.shape, spec.dtype) == (array.shape, array.dtype.name), path


def described_weights(plan: LayerPlan) -> LayerWeights:
    """Describe what `layer_runs.layer_weights` makes."""
    model = Axis("model", 2 * plan.heads * plan.head_dim)
    out = Axis("kv_heads", plan.heads, each=plan.head_dim)
    kernel, gains, eps, bias = (
        ArraySpec(axes, "float32") for axes in ((model, out), (model,), (), (out,))
    )
    biased = isinstance(plan.k, BiasSubtracting)
    return LayerWeights(kernel, kernel, gains, eps, k_bias=bias if biased else None)
