"""The fingerprint of a model, by which a calibration knows the model that it was fitted for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.placement.processes import fetched
from kvq_models.calibration.file import Calibration, read_calibration
from kvq_models.llama import hf_names
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama, abstract_llama
from kvq_models.llama.packed_weights import dense
from kvq_models.llama.rope_config import RopeConfig


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


# fields of RopeConfig that older models lack: at their defaults they change no fingerprint
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


def load_calibration(
    path: str | os.PathLike[str], llama: Llama, spec: CacheSpec | str
) -> Calibration:
    """Read a calibration for `spec` and this model, after checking everything about it.

    Args:
        path: a file written by `save_calibration`.
        llama: the model; its weights are compared by a hash.
        spec: the cache to use the calibration for.

    Raises FileNotFoundError if there is no file, and ValueError, in one line, if the file is not a
    calibration, cannot be read, or does not match its checksum, or naming what differs: the model,
    the options it was calibrated for, a missing layer, or a tensor that is missing, unknown, not
    finite, or of another shape or dtype. A file without a checksum, from an older version, is read
    with a warning.
    """
    return read_calibration(path, parse(spec), llama.config, partial_fingerprint(llama))
