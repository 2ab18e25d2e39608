"""Parameters of single layers: from calibration rows and from weights, and what is refused by
name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvq_jax as kvq
from kvq_jax.cache.cache import dims_of
from kvq_jax.cache.parameters import parameter_axes, parameter_plans
from tests.kvq_jax.cache.test_step import refused
from tests.kvq_jax.layer_runs import DIMS, key_bias, layer_weights, sequences

SPEC = "kvquant:bits=3,outliers=0.05"
WEIGHTS = layer_weights(2, 32)


def rows(tokens: int = 90) -> dict[str, np.ndarray]:
    own = sequences(2)
    return {"k": own.k_pre[:, :, :tokens], "v": own.v[:, :, :tokens]}


def ones(of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {side: np.ones_like(array) for side, array in of.items()}


def test_calibrated_arrays_become_the_parameters_of_both_sides():
    calibrated = kvq.parameters.calibrate(SPEC, DIMS, 0, rows(), ones(rows()))
    assert set(calibrated) == {"k", "v"}
    k, v = kvq.parameters.prepare(SPEC, DIMS, 0, calibrated=calibrated)
    flat = np.moveaxis(rows()["k"], 1, 2).reshape(-1, 2, 32)
    low, high = np.percentile(flat, [2.5, 97.5], axis=0)
    np.testing.assert_allclose(k["lower"], low, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(k["upper"], high, rtol=1e-5, atol=1e-6)
    assert k["levels"].shape == v["levels"].shape == (8,)
    again = kvq.parameters.calibrate(SPEC, DIMS, 0, rows(), ones(rows()))
    jax.tree.map(np.testing.assert_array_equal, again, calibrated)
    weighed = kvq.parameters.calibrate(
        SPEC, DIMS, 0, rows(), {side: array**2 for side, array in rows().items()}
    )
    assert np.abs(weighed["k"]["levels"] - calibrated["k"]["levels"]).max() > 1e-3, (
        "gradients do not weigh"
    )


def test_ranges_of_channels_come_in_the_dtype_of_kernels_too():
    """Where kernels scale the rows of keys: before RoPE. A cache takes parameters with them and
    without."""
    calibrated = kvq.parameters.calibrate(SPEC, DIMS, 0, rows(), ones(rows()))
    k, v = kvq.parameters.prepare(SPEC, DIMS, 0, calibrated=calibrated)
    assert {name for name in k | v if name.startswith("kernel_")} == {"kernel_scale", "kernel_zero"}
    for name in ("scale", "zero"):
        np.testing.assert_array_equal(k[f"kernel_{name}"], np.asarray(k[name]).astype(np.float16))
        assert (np.asarray(k[f"kernel_{name}"], np.float32) != np.asarray(k[name])).any(), (
            "they are not rounded"
        )
    after_rope = kvq.parameters.prepare(f"{SPEC},pre_rope=false", DIMS, 0, calibrated=calibrated)[0]
    assert set(after_rope) == set(calibrated["k"])
    plan = parameter_plans(kvq.parse(SPEC), dims_of(DIMS))[0]
    for given in ((k, v), (after_rope, v)):
        axes = parameter_axes(plan, dims_of(DIMS), given)
        shapes = [jax.tree.map(lambda array: array.shape, tree) for tree in (axes, given)]
        assert shapes[0] == shapes[1]


def test_sides_and_layers_without_parameters_are_left_out():
    spec = f"k={SPEC}+v=int4+cache:sink=1,recent=0,block=32,skip_layers=0"
    assert kvq.parameters.calibrate(spec, DIMS, 0, {}, {}) == {}
    assert kvq.parameters.prepare(spec, DIMS, 0) == ((), ())
    calibrated = kvq.parameters.calibrate(spec, DIMS, 1, rows(), ones(rows()))
    assert set(calibrated) == {"k"}
    assert kvq.parameters.prepare(spec, DIMS, 1, calibrated=calibrated)[1] == ()
    both = kvq.parameters.prepare("kivi", DIMS, 0, weights=WEIGHTS, calibrated=calibrated)
    assert both == ((), ())


def test_weights_that_are_used_as_they_are_are_shared():
    spec = "xquant:latent=false"
    k, v = kvq.parameters.prepare(spec, DIMS, 0, weights=WEIGHTS)
    assert k is v, "one body for both sides"
    assert k["k"]["kernel"] is WEIGHTS.k_kernel
    biased = layer_weights(2, 32, key_bias(64))
    k, _ = kvq.parameters.prepare("int8:subtract_bias=true", DIMS, 0, weights=biased)
    assert k["bias"] is biased.k_bias


def test_both_kinds_stand_beside_each_other():
    spec, biased = f"{SPEC},subtract_bias=true", layer_weights(2, 32, key_bias(64))
    calibrated = kvq.parameters.calibrate(spec, DIMS, 0, rows(), ones(rows()))
    k, _ = kvq.parameters.prepare(spec, DIMS, 0, weights=biased, calibrated=calibrated)
    assert {"bias", "levels", "scale"} <= set(k)


def prepared(spec: str, layer: int = 0, **options: Any) -> Any:
    return kvq.parameters.prepare(spec, DIMS, layer, **options)


def calibrated_on(of_rows: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> Any:
    return kvq.parameters.calibrate(SPEC, DIMS, 0, of_rows, gradients)


def fitted_to(queries: np.ndarray) -> Any:
    return kvq.parameters.calibrate("block_gtq", DIMS, 0, rows(), ones(rows()), queries)


def scaled(of_values: float) -> Any:
    dims = dataclasses.replace(DIMS, kv_scales=True)
    calibrated = {"k": {"scale": np.ones(2)}, "v": {"scale": np.array([1.0, of_values])}}
    return kvq.parameters.prepare("fp8", dims, 0, calibrated=calibrated)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: prepared("kivi", -1), "layer=-1, but the model has layers 0 to 1"),
    (lambda: prepared("kivi", 2), "layer=2, but the model has layers 0 to 1"),
    (
        lambda: kvq.parameters.calibrate(SPEC, DIMS, -1, rows(), rows()),
        "layer=-1, but the model has layers 0 to 1",
    ),
    (lambda: prepared("xquant", 1), "'xquant' needs the weights of layer 1: give kvq.*weights="),
    (lambda: prepared(SPEC), "k of layer 0 needs levels, .*: give kvq.*calibrated="),
    (
        lambda: prepared("kvquant:bits=2", calibrated=calibrated_on(rows(), ones(rows()))),
        "needs calibrated arrays of shapes",
    ),
    (
        lambda: prepared("xquant", weights=layer_weights(1, 32)),
        r"k_kernel must be \[D, K \* H\] = \[128, 64\], got \[64, 32\]",
    ),
    (lambda: prepared("int8:subtract_bias=true", weights=WEIGHTS), "has no bias"),
    (lambda: calibrated_on({"k": rows()["k"]}, ones(rows())), r"give rows\['v'\] and gradients"),
    (lambda: calibrated_on(rows() | {"k": rows()["k"][0]}, ones(rows())), r"rows\['k'\] must be"),
    (lambda: calibrated_on(rows(), ones(rows(80))), "have 180 and 160 tokens"),
    (
        lambda: fitted_to(np.ones((1, 4, 0, 32))),
        r"queries must be finite, .*got shape \[1, 4, 0, 3",
    ),
    (lambda: fitted_to(np.full((1, 4, 3, 32), np.nan)), "queries must be finite"),
    (lambda: scaled(0.0), r"calibrated\['v'\]\['scale'\] must be positive and finite, got 0.0"),
    (lambda: scaled(-1.0), r"calibrated\['v'\]\['scale'\] must be positive and finite, got -1.0"),
    (lambda: scaled(np.nan), r"calibrated\['v'\]\['scale'\] must be positive and finite, got nan"),
    (lambda: scaled(np.inf), r"calibrated\['v'\]\['scale'\] must be positive and finite, got inf"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_missing_or_of_another_model_is_named(call: Callable[[], Any], message: str):
    refused(message, call)


@pytest.mark.parametrize("spec", ["waterfill", "waterfill:key_basis=eigen", "block_gtq"])
def test_a_calibration_of_no_layer_leaves_the_options_open(spec: str):
    method = kvq.parse(spec).k
    assert method.fitted({"k": [{}, {}], "v": [{}, {}]}, DIMS) == method


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_plan_takes_the_parameters_of_one_layer(count: int):
    calibrated = kvq.parameters.calibrate(SPEC, DIMS, 0, rows(), ones(rows()))
    of_layers = [kvq.parameters.prepare(SPEC, DIMS, 0, calibrated=calibrated)] * count
    plan = kvq.layer_plan(SPEC, DIMS, layer=0, capacity=64, dtype="float32")
    message = r"parameters of layer 0 must be a pair \(keys, values\), which kvq.*prepare"
    refused(message, plan.read, plan.init(1), parameters=of_layers)
    cache = kvq.init_cache(SPEC, DIMS, 1, 64)
    refused(message, kvq.begin, cache, 1, prefill=False, parameters=of_layers[0])


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("spec", "weight", "message"),
    [
        ("int8:subtract_bias=true", {"k_bias": (32,)}, r"k_bias must be \[K \* H\] = \[64\], got"),
        ("xquant", {"v_bias": (2, 32)}, r"v_bias must be \[K \* H\] = \[64\], got \[2, 32\]"),
        ("xquant", {"k_norm": (64,)}, r"k_norm must be \[H\] = \[32\], got \[64\]"),
        ("xquant", {"input_norm": (64,)}, r"input_norm must be \[D\] = \[128\], got \[64\]"),
    ],
)
def test_weights_of_other_shapes_are_refused(spec: str, weight: dict[str, Any], message: str):
    """A bias of one head was subtracted from all."""
    given = {name: jnp.ones(shape) for name, shape in weight.items()}
    refused(message, prepared, spec, weights=dataclasses.replace(WEIGHTS, **given))


def test_the_parameters_of_another_spec_or_model_are_refused():
    """Tables of levels for 3 bits were read as those for 4: other keys and values, in silence."""
    fitted = kvq.parameters.calibrate(SPEC, DIMS, 0, rows(), ones(rows()))
    own = kvq.parameters.prepare(SPEC, DIMS, 0, calibrated=fitted)
    wide = SPEC.replace("bits=3", "bits=4")
    of_wide = kvq.parameters.calibrate(wide, DIMS, 0, rows(), ones(rows()))
    other = kvq.parameters.prepare(wide, DIMS, 0, calibrated=of_wide)
    message = r"parameters of layer 0 are of another .*levels of keys must be \[8\], got \[16\]"
    plan = kvq.layer_plan(SPEC, DIMS, layer=0, capacity=64, dtype="float32")
    refused(message, plan.read, plan.init(1), parameters=other)
    refused("levels of values must be", plan.read, plan.init(1), parameters=(own[0], other[1]))
    dims = dataclasses.replace(dims_of(DIMS), num_hidden_layers=1)
    cache = kvq.init_cache(SPEC, dims, 1, 64)
    refused(message, kvq.begin, cache, 1, prefill=False, parameters=[other])
    refused(message, kvq.rows.trim, cache, [0], (other,))
    refused("needs parameters for keys and values", kvq.rows.trim, cache, [0])
    heads = dataclasses.replace(dims, num_key_value_heads=1, num_attention_heads=2)
    of_one_head = kvq.layer_plan(SPEC, heads, layer=0, capacity=64, dtype="float32")
    refused("scale of keys must be", of_one_head.read, of_one_head.init(1), parameters=own)
