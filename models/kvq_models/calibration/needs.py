"""The sides of a cache's layers that need calibrated parameters, and the fingerprint of a model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.cache import dims_of
from kvq_jax.cache.parameters import parameter_plans
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.codecs.codec import Codec, Side
from kvq_jax.methods.base import Method
from kvq_jax.placement.processes import fetched
from kvq_jax.types.array_types import ArraySpec, ModelDims
from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.packed_weights import dense
from kvq_models.llama.rope_config import RopeConfig


class Need(NamedTuple):
    """One side of one layer that needs parameters. `options` spells out everything they depend on:
    parameters fitted for equal options are interchangeable."""

    layer: int
    side: Side
    codec: Codec
    options: str
    parameters: dict[str, ArraySpec]


def needs(spec: CacheSpec, config: ModelDims) -> dict[str, Need]:
    """Return the needs of `spec` for this model as {"layers.0.k": Need, ...}, or {} for methods
    without parameters.

    Raises ValueError if the spec does not fit the model.
    """
    needed = {}
    dims = dims_of(config)
    for layer, plan in enumerate(parameter_plans(spec, dims)):
        sides: tuple[tuple[Side, Method, Codec], ...] = (
            ("k", spec.k, plan.k),
            ("v", spec.v, plan.v),
        )
        for side, method, codec in sides:
            parameters = codec.learning.parameters(plan.heads)
            if parameters and not codec.learning.brought:
                needed[f"layers.{layer}.{side}"] = Need(
                    layer, side, codec, f"{method.name}:{codec.learning.key}", parameters
                )
    return needed


def partial_fingerprint(llama: Llama) -> str:
    """Return a hash that distinguishes models of the same size, independent of the dtype they were
    loaded in.

    It is the sha256, as 64 hex digits, of the RoPE settings and of the bfloat16 values of every
    norm, the first layer's key projection and the last layer's value projection.
    `kvq_jax.files.fingerprint` hashes all weights exactly.
    """
    weights = {weight.name: weight for weight in hf_names.weights(llama).values()}

    def read(name: str) -> np.ndarray:
        whole = fetched(dense(weights[name].leaf))
        return whole.T if weights[name].transpose else whole

    return partial_fingerprint_of(llama.config, read)


# of RopeConfig; models of before do not have them, and keep their fingerprints
_LATER = ("partial_rotary_factor", "short_factor", "long_factor")


def _settings(rope: RopeConfig) -> tuple[Any, ...]:
    return tuple(
        getattr(rope, field.name)
        for field in dataclasses.fields(rope)
        if field.name not in _LATER or getattr(rope, field.name) != field.default
    )


def partial_fingerprint_of(config: LlamaConfig, read: Callable[[str], np.ndarray]) -> str:
    """Return a model's `partial_fingerprint`. `read` returns its tensors by Hugging Face name, in
    Hugging Face's orientation."""
    digest = hashlib.sha256(repr(_settings(config.rope)).encode())
    if config.local_rope is not None:
        digest.update(repr(_settings(config.local_rope)).encode())
    last = config.num_hidden_layers - 1
    projections = (
        "model.layers.0.self_attn.k_proj.weight",
        f"model.layers.{last}.self_attn.v_proj.weight",
    )
    for name in (weight.name for weight in hf_names.weights(abstract_llama(config)).values()):
        if "norm" in name or name in projections:
            digest.update(
                np.ascontiguousarray(read(name).astype(jnp.dtype("bfloat16"))).view(np.uint8).data
            )
    return digest.hexdigest()
