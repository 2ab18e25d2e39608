"""Method parameters: what a cache method needs beside the codes, calibrated on a text or made from the weights, carried by the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvq_jax.array_types import LayerWeights
from kvq_jax.bias import check_bias
from kvq_jax.cache import dims_of, plans
from kvq_jax.plan import LayerPlan
from kvq_jax.spec import CacheSpec, parse
from models.calibration.file import Calibration, check_tensors, read_calibration
from models.calibration.needs import fingerprint, needs
from models.config import LlamaConfig
from models.llama import Layer, Llama, abstract_llama

Given = Calibration | str | os.PathLike[str]  # a calibration, or its file
Progress = Callable[[Sequence[int], str], Iterable[int]]  # shows how far a loop over layers is


def prepare(llama: Llama, spec: CacheSpec | str, calibration: Given | None = None, progress: Progress | None = None) -> Llama:
    """The model with what `spec` needs in its `cache_parameters`; the identity for methods without parameters.

    The weights are shared with the given model. `progress` wraps the loop over layers whose weights are factored (seconds a layer for large
    models), as tqdm would. ValueError, in one line, where the spec does not fit the model (or subtracts a bias that its keys do not have),
    needs a calibration that is not given (the line says how to make one), or takes none, and where the calibration is not one for this
    model and spec (`models.calibration.file.load_calibration`). FileNotFoundError where its file is missing.
    """
    spec = parse(spec)
    checked = check_calibration(spec, llama.config, calibration, None if calibration is None else fingerprint(llama))
    parameters = _parameters(llama, spec, checked, progress)
    if not parameters and not jax.tree.leaves(llama.cache_parameters):
        return llama
    prepared = jax.tree.map(lambda leaf: leaf, llama)
    prepared.cache_parameters = nnx.data(parameters)
    return prepared


def layer_weights(layer: Layer) -> LayerWeights:
    """What of a layer's weights cache methods may build on: the model's own arrays, or ShapeDtypeStructs of an abstract one."""
    k, v, norm = layer.k_proj, layer.v_proj, layer.k_norm
    return LayerWeights(
        k_kernel=k.kernel.get_value(),
        v_kernel=v.kernel.get_value(),
        k_bias=None if k.bias is None else k.bias.get_value(),
        v_bias=None if v.bias is None else v.bias.get_value(),
        k_norm=None if norm is None else norm.scale.get_value(),
        input_norm=layer.input_norm.scale.get_value(),
        norm_eps=jnp.asarray(layer.input_norm.eps, jnp.float32),
    )


def check_weights(spec: CacheSpec, config: LlamaConfig) -> None:
    """ValueError, in one line, where the spec needs weights that a model of this config does not have."""
    if spec.subtract_bias:
        check_bias(layer_weights(abstract_llama(dataclasses.replace(config, num_hidden_layers=1)).layers[0]))


def check_calibration(
    spec: CacheSpec, config: LlamaConfig, calibration: Given | None, model_fingerprint: str | None = None
) -> Calibration | None:
    """The calibration that `spec` is to be used with, checked; None where it needs none. Raises as `prepare`.

    Without `model_fingerprint`, everything is compared but the weights.
    """
    if calibration is None:
        if needs(spec, config):
            raise ValueError(f"{str(spec)!r} needs a calibration: {how_to_calibrate(spec)}")
        return None
    if not isinstance(calibration, Calibration):
        return read_calibration(calibration, spec, config, model_fingerprint)
    check_tensors("a calibration in memory", calibration, spec, config, model_fingerprint)
    return calibration


def how_to_calibrate(spec: CacheSpec) -> str:
    return f"make one with kvq calibrate MODEL --text FILE --cache '{spec}' --out F.safetensors, then give --calibration F.safetensors"


def _parameters(llama: Llama, spec: CacheSpec, calibration: Calibration | None, progress: Progress | None) -> tuple[Any, ...]:
    """(k, v) of every layer: a tree of arrays, or () for a side that needs none; () where no side of any layer needs any."""
    sides: dict[tuple[int, str], Any] = {}
    if calibration is not None:
        for name, need in needs(spec, llama.config).items():
            sides[need.layer, need.side] = {own: jnp.asarray(calibration.tensors[f"{name}.{own}"]) for own in need.parameters}
    weighted = [i for i, plan in enumerate(_plans(llama, spec)) if plan.k.takes_weights or plan.v.takes_weights]
    for layer in progress(weighted, "preparing layers") if progress else weighted:
        pair = _plans(llama, spec)[layer].from_weights(layer_weights(llama.layers[layer]))
        sides |= {(layer, side): sides.get((layer, side), {}) | own for side, own in zip(("k", "v"), pair, strict=True) if own}
    if not sides:
        return ()
    return tuple((sides.get((layer, "k"), ()), sides.get((layer, "v"), ())) for layer in range(llama.config.num_hidden_layers))


def _plans(llama: Llama, spec: CacheSpec) -> tuple[LayerPlan, ...]:
    return plans(spec, dims_of(llama.config), spec.sink + spec.recent + spec.block, "float32")
