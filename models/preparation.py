"""Method parameters: what a cache method needs beside the weights, calibrated once and carried by the model."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvq_jax.spec import CacheSpec, parse
from models.calibration.file import Calibration, check_tensors, read_calibration
from models.calibration.needs import fingerprint, needs
from models.config import LlamaConfig
from models.llama import Llama

Given = Calibration | str | os.PathLike[str]  # a calibration, or its file


def prepare(llama: Llama, spec: CacheSpec | str, calibration: Given | None = None) -> Llama:
    """The model with what `spec` needs in its `cache_parameters`; the identity for methods without parameters.

    The weights are shared with the given model. ValueError, in one line, where the spec does not fit the model, needs a calibration that is
    not given (the line says how to make one), or takes none, and where the calibration is not one for this model and spec
    (`models.calibration.file.load_calibration`). FileNotFoundError where its file is missing.
    """
    spec = parse(spec)
    checked = check_calibration(spec, llama.config, calibration, None if calibration is None else fingerprint(llama))
    if checked is None and not jax.tree.leaves(llama.cache_parameters):
        return llama
    prepared = jax.tree.map(lambda leaf: leaf, llama)
    prepared.cache_parameters = nnx.data(() if checked is None else _parameters(checked, spec, llama.config))
    return prepared


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


def _parameters(calibration: Calibration, spec: CacheSpec, config: LlamaConfig) -> tuple[Any, ...]:
    """(k, v) of every layer: a dict of arrays, or () for a side that needs none."""
    sides: dict[tuple[int, str], Any] = {}
    for name, need in needs(spec, config).items():
        sides[need.layer, need.side] = {own: jnp.asarray(calibration.tensors[f"{name}.{own}"]) for own in need.parameters}
    return tuple((sides.get((layer, "k"), ()), sides.get((layer, "v"), ())) for layer in range(config.num_hidden_layers))
