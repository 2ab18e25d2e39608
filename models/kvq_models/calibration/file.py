"""A calibration in memory and on disk: one safetensors file, whose header records its origin and
the caches it serves.

    header   format "kvq-calibration", format_version, spec, keys (the options that each layer and
             side was fitted for), dims, model_fingerprint, text, tokens_sha256, samples, length,
             seed, dtype, loss, and a checksum of all the rest (kvq_jax/files/checksum.py); files of
             version 1 have none
    tensors  layers.{i}.{k|v}.{name}, as the codecs' `parameters` declare them

A file is untrusted input: no tensor is read before its name, shape and dtype agree with what the
requested cache needs of this model, and none is returned before the checksum is verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from kvq_jax.cache.cache import CacheDims, dims_of
from kvq_jax.cache.serialization import DTYPES
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Side
from kvq_jax.files.checksum import read_tensors, save_tensors
from kvq_jax.methods.base import Method
from kvq_jax.types.array_types import ModelDims
from kvq_models.calibration.needs import Need, fingerprint, needs
from kvq_models.llama.model import Llama

FORMAT, VERSION, WITHOUT_CHECKSUM = "kvq-calibration", "2", "1"
_TENSOR = re.compile(r"(layers\.\d+\.[kv])\.(.+)")


class Array(NamedTuple):
    """The dtype and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a calibration: its text and settings. tokens_sha256 hashes the text's token ids
    (int32, little-endian); loss is the mean cross-entropy of the samples in nats per token."""

    text: str
    tokens_sha256: str
    samples: int
    length: int
    seed: int
    dtype: str
    loss: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibrated parameters of a cache's layers and sides. keys: the options that each "layers.0.k"
    was fitted for; tensors: the arrays, by "layers.0.k.name"."""

    spec: str
    dims: CacheDims
    model_fingerprint: str
    keys: Mapping[str, str]
    origin: Origin
    tensors: Mapping[str, np.ndarray]

    def serves(self, side: Side) -> bool:
        """Return True where some layer has parameters for this side."""
        return any(name.endswith(f".{side}") for name in self.keys)

    def parameters(self, layer: int, side: Side) -> dict[str, np.ndarray]:
        """Return the arrays of one side of one layer by their own names; empty where it has
        none."""
        prefix = f"layers.{layer}.{side}."
        return {
            name.removeprefix(prefix): array
            for name, array in self.tensors.items()
            if name.startswith(prefix)
        }


def resolved(spec: CacheSpec | str, calibration: Calibration) -> CacheSpec:
    """Return the spec with the options that a calibration decides and that it leaves open
    (waterfill's widths), else the spec itself.

    The calibration serves both. What follows from a spec, sizes included, follows from the one that
    is used: give this one to `prepare` and to the cache.
    """
    spec = parse(spec)
    filled = [
        method.fitted(_of_sides(calibration, sides), calibration.dims)
        for method, sides in _methods(spec)
    ]
    return dataclasses.replace(spec, k=filled[0], v=filled[-1])


def predicted_divergence(spec: CacheSpec | str, calibration: Calibration) -> float | None:
    """Return the KL divergence in nats per token that a calibration predicts for tokens read from
    the body, to second order; None where a side's method cannot tell."""
    found = [
        m.predicted_divergence(_of_sides(calibration, sides), calibration.dims)
        for m, sides in _methods(parse(spec))
    ]
    told = [own for own in found if own is not None]
    return (
        sum(told) * calibration.origin.length**2 if len(told) == len(found) else None
    )  # from gradients of the mean to those of the sum


def _methods(spec: CacheSpec) -> tuple[tuple[Method, tuple[Side, ...]], ...]:
    """Return each method of a spec with the sides that it serves."""
    return ((spec.k, ("k", "v")),) if spec.k == spec.v else ((spec.k, ("k",)), (spec.v, ("v",)))


def _of_sides(
    calibration: Calibration, sides: tuple[Side, ...]
) -> dict[Side, list[dict[str, np.ndarray]]]:
    """Return the parameters of every layer of these sides, by side; sides without any are left
    out."""
    layers = range(calibration.dims.num_hidden_layers)
    return {
        side: [calibration.parameters(layer, side) for layer in layers]
        for side in sides
        if calibration.serves(side)
    }


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write the file; it appears whole or not at all. Equal calibrations give equal bytes."""
    header = {
        "format": FORMAT,
        "format_version": VERSION,
        "spec": calibration.spec,
        "dims": json.dumps(dataclasses.asdict(calibration.dims)),
        "model_fingerprint": calibration.model_fingerprint,
        "keys": json.dumps(dict(calibration.keys)),
        **{name: str(value) for name, value in dataclasses.asdict(calibration.origin).items()},
    }
    save_tensors(path, calibration.tensors, header)


def load_calibration(
    path: str | os.PathLike[str], llama: Llama, spec: CacheSpec | str
) -> Calibration:
    """Read a calibration for `spec` and this model, after checking everything about it.

    Raises ValueError, in one line, where the file is no calibration or cannot be read, or naming
    what differs: the model, the options that it was calibrated for, a layer that it lacks, a tensor
    that is missing, unknown, of another shape or dtype, or not finite; or where the content does
    not have its checksum. FileNotFoundError where there is no file. A file without a checksum, of
    an older version, is read with a warning.
    """
    return read_calibration(path, parse(spec), llama.config, fingerprint(llama))


def read_calibration(
    path: str | os.PathLike[str], spec: CacheSpec, config: ModelDims, model_fingerprint: str | None
) -> Calibration:
    """Read a calibration as `load_calibration` does, for a model whose weights need not be there: a
    fingerprint of None is not compared."""
    path, where = Path(path), repr(str(path))
    needed = _needed(where, spec, config)
    if not path.is_file():
        raise FileNotFoundError(f"calibration {where} is not a file")
    with _opened(path) as file:
        header = file.metadata() or {}
        calibration = _described(path, header)
        stored = {name: _array(file.get_slice(name)) for name in list(file.keys())}
        names = check(where, calibration, stored, spec, config, model_fingerprint)
        tensors = read_tensors(file, where, required=header["format_version"] != WITHOUT_CHECKSUM)
    tensors = {name: tensors[name] for name in names}
    calibration = dataclasses.replace(
        calibration, keys={name: calibration.keys[name] for name in needed}, tensors=tensors
    )
    check_tensors(where, calibration, spec, config, model_fingerprint)
    return calibration


def check(
    where: str,
    calibration: Calibration,
    stored: Mapping[str, Array],
    spec: CacheSpec,
    config: ModelDims,
    model_fingerprint: str | None,
) -> list[str]:
    """Return the names of the tensors that `spec` needs, all of them among `stored`. Raise
    ValueError, in one line, naming what differs."""
    dims, needed = dims_of(config), _needed(where, spec, config)
    if calibration.dims != dims:
        raise ValueError(
            f"{where} was calibrated for another model: {_difference(calibration.dims, dims)}"
        )
    if model_fingerprint not in (None, calibration.model_fingerprint):
        raise ValueError(
            f"{where} was calibrated for another model of the same size: fingerprint"
            f" {calibration.model_fingerprint[:12]}, and this model has"
            f" {str(model_fingerprint)[:12]}"
        )
    for name, need in needed.items():
        if name not in calibration.keys:
            raise ValueError(
                f"{where} lacks {name}, which {str(spec)!r} needs; it was calibrated for"
                f" {calibration.spec!r}"
            )
        if calibration.keys[name] != need.options:
            raise ValueError(
                f"{where} was calibrated for other options: {name} for {calibration.keys[name]!r},"
                f" asked for {need.options!r}"
            )
    promised = {
        f"{name}.{own}": Array(described.dtype, described.shape)
        for name, need in needed.items()
        for own, described in need.parameters.items()
    }
    _compare(where, stored, promised, calibration.keys, needed)
    return sorted(promised)


def check_tensors(
    where: str,
    calibration: Calibration,
    spec: CacheSpec,
    config: ModelDims,
    model_fingerprint: str | None,
) -> None:
    """Run `check` on the tensors that a calibration holds, and check that those of floats are
    finite."""
    stored = {
        name: Array(tensor.dtype.name, tensor.shape) for name, tensor in calibration.tensors.items()
    }
    for name in check(where, calibration, stored, spec, config, model_fingerprint):
        tensor = calibration.tensors[name]
        if (
            jnp.issubdtype(tensor.dtype, jnp.floating)
            and not np.isfinite(tensor.astype(np.float32)).all()
        ):
            raise ValueError(f"{where}: tensor {name} is not finite")


def _needed(where: str, spec: CacheSpec, config: ModelDims) -> dict[str, Need]:
    needed = needs(spec, config)
    if not needed:
        raise ValueError(f"{str(spec)!r} takes no calibration, but {where} was given")
    return needed


def _compare(
    where: str,
    stored: Mapping[str, Array],
    promised: Mapping[str, Array],
    keys: Mapping[str, str],
    needed: Mapping[str, Need],
) -> None:
    """Compare stored tensors with promised ones. Those of other layers and sides are allowed where
    the header lists them."""
    for name in stored:
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in keys or (match[1] in needed and name not in promised):
            raise ValueError(f"{where}: tensor {name} is unknown")
    for name, array in promised.items():
        if name not in stored:
            raise ValueError(f"{where}: tensor {name} is missing")
        if stored[name] != array:
            raise ValueError(f"{where}: tensor {name} is {stored[name]}, expected {array}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"calibration {str(path)!r} is not a whole safetensors file:"
            f" {str(error).splitlines()[0]}"
        ) from error


def _described(path: Path, header: Mapping[str, str]) -> Calibration:
    """Return the header as a calibration without tensors."""
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} is not a calibration: its header has format={header.get('format')!r},"
            f" not {FORMAT!r}"
        )
    if header.get("format_version") not in (VERSION, WITHOUT_CHECKSUM):
        raise ValueError(
            f"{str(path)!r} has format_version={header.get('format_version')!r}; this version of"
            f" kvq reads {VERSION!r}"
        )
    readers = {
        "text": str,
        "tokens_sha256": str,
        "samples": int,
        "length": int,
        "seed": int,
        "dtype": str,
        "loss": float,
    }

    def read(field: str, reader: Any) -> Any:
        try:
            return reader(header[field])
        except (
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # RecursionError: JSON that is nested too deeply
            raise ValueError(
                f"{str(path)!r}: header field {field}={header.get(field)!r} cannot be read"
            ) from error

    return Calibration(
        spec=read("spec", str),
        dims=read("dims", lambda text: CacheDims(**json.loads(text))),
        model_fingerprint=read("model_fingerprint", str),
        keys=read(
            "keys",
            lambda text: {
                str(name): str(options) for name, options in dict(json.loads(text)).items()
            },
        ),
        origin=Origin(**{field: read(field, reader) for field, reader in readers.items()}),
        tensors={},
    )


def _array(tensor: Any) -> Array:
    dtype = str(tensor.get_dtype())
    return Array(DTYPES.get(dtype, dtype), tuple(tensor.get_shape()))


def _difference(stored: CacheDims, asked: CacheDims) -> str:
    field = next(
        f.name
        for f in dataclasses.fields(CacheDims)
        if getattr(stored, f.name) != getattr(asked, f.name)
    )
    return f"{field} {getattr(stored, field)}, and this model has {getattr(asked, field)}"
