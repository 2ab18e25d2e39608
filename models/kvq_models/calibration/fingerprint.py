"""The fingerprint of a model, by which a calibration knows the model that it was fitted for."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.placement.processes import fetched
from kvq_models.calibration.file import Calibration, read_calibration
from kvq_models.llama import hf_names
from kvq_models.llama.checkpoint import Checkpoint, described
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_weights import is_packed

SAMPLED = 4  # rows of a matrix, and experts
# fields of LlamaConfig that change nothing that a layer computes
_BESIDE_LAYERS = (
    "model_type",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_ids",
    "pad_token_id",
    "brings_kv_scales",
)


def partial_fingerprint(llama: Llama) -> str:
    """Return a hash that distinguishes models of the same size, independent of the dtype they were
    loaded in.

    It is the sha256, as 64 hex digits, of the settings that change what a layer computes, and of
    bfloat16 values of every weight: all of a vector, and `SAMPLED` rows of a matrix, in Hugging
    Face's orientation, of `SAMPLED` experts. A change of single other rows is not seen.
    `kvq_jax.files.fingerprint` hashes all weights exactly.
    """
    return _fingerprint(llama, lambda weight: fetched(_rows(weight.leaf, weight.transpose)))


def partial_fingerprint_of(checkpoint: Checkpoint) -> str:
    """Return the `partial_fingerprint` of the model in a checkpoint, of which those rows alone are
    read. Raises as `load_llama` does, but for values that are not finite."""
    return _fingerprint(described(checkpoint), functools.partial(_stored_rows, checkpoint))


def _fingerprint(llama: Llama, rows: Callable[[hf_names.Weight], np.ndarray]) -> str:
    digest = hashlib.sha256(repr(_settings(_of_layers(llama.config))).encode())
    for weight in hf_names.weights(llama).values():
        digest.update(weight.name.encode())
        values = np.ascontiguousarray(rows(weight).astype(jnp.dtype("bfloat16")))
        digest.update(values.view(np.uint8).data)
    return digest.hexdigest()


def _of_layers(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields that change what a layer computes and that have no default's value: a field
    that a later version adds changes no fingerprint of models without it."""
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.compare and field.name not in _BESIDE_LAYERS
    }
    if config.rope.rope_type != "dynamic":  # whose base depends on it
        del fields["max_position_embeddings"]
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if value != defaults[name]}


def _settings(value: Any) -> Any:
    """Return settings as plain values, with floats as precise as a GGUF file states them."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, tuple):
        return [_settings(entry) for entry in value]
    if isinstance(value, dict):
        return [(name, _settings(entry)) for name, entry in value.items()]
    if dataclasses.is_dataclass(value):
        return [
            (field.name, _settings(getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
    return value


def _spaced(count: int) -> np.ndarray:
    """Return `SAMPLED` indices below a count, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, SAMPLED).astype(np.int32))


@functools.partial(jax.jit, static_argnames="transpose")
def _rows(leaf: Any, transpose: bool) -> Float[Array, "..."]:
    """Return the sampled rows of a weight in this model's orientation."""
    shape = leaf.shape
    if len(shape) == 1:
        return leaf
    experts = _spaced(shape[0]) if len(shape) == 3 else np.zeros(1, np.int32)
    outputs = _spaced(shape[0] if len(shape) == 2 and not transpose else shape[-1])
    if is_packed(leaf):
        return leaf.columns(jnp.asarray((experts[:, None] * shape[-1] + outputs).reshape(-1)))
    if len(shape) == 3:
        return jnp.swapaxes(leaf[experts][:, :, outputs], 1, 2)
    return leaf[:, outputs].T if transpose else leaf[outputs]


def _stored_rows(checkpoint: Checkpoint, weight: hf_names.Weight) -> np.ndarray:
    """Return the same rows, read from a checkpoint."""
    shape = weight.spec.shape
    if len(shape) == 1:
        return checkpoint.read(weight.name)
    if len(shape) == 3 and "*" not in weight.name:  # [experts, in, out]
        part = checkpoint.parts(weight.name)
        at = [(_one(e), slice(None), _one(o)) for e in _spaced(shape[0]) for o in _spaced(shape[2])]
        return np.stack([part(index).reshape(-1) for index in at])
    matrices = [weight.stored_names[e] for e in _spaced(len(weight.stored_names))]
    outputs = _spaced(weight.hf_shape[0])
    rows = []
    for part in map(checkpoint.parts, matrices):
        rows += [part((_one(output),)).reshape(-1) for output in outputs]
    return np.stack(rows)


def _one(index: np.integer) -> slice:
    return slice(int(index), int(index) + 1)


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
    finite, or of another shape or dtype. A file of an older version, whose fingerprint was of few
    weights, is refused.
    """
    return read_calibration(path, parse(spec), llama.config, partial_fingerprint(llama))
