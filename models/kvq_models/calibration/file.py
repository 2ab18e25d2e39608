"""A calibration in memory and on disk: one safetensors file. Its header records the calibration's
origin and the caches it serves.

    header   format "kvq-calibration", format_version, spec, keys (the options that each layer and
             side was fitted for), dims, model_fingerprint, text, tokens_sha256, samples, length,
             seed, dtype, loss, and a checksum of everything else (kvq_jax/files/checksum.py)
    tensors  layers.{i}.{k|v}.{name}, as the codecs' `parameters` declare them

A file is untrusted input. No tensor is read before its name, shape and dtype agree with what the
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
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.codecs.codec import Side
from kvq_jax.files.checksum import DTYPES, read_tensors, save_tensors
from kvq_jax.files.json_text import parse_json
from kvq_jax.methods.base import Method
from kvq_jax.types.array_types import ModelDims
from kvq_models.calibration.needs import Need, needs

# the fingerprints of versions 1 and 2 were of few weights
FORMAT, VERSION = "kvq-calibration", "3"
_TENSOR = re.compile(r"(layers\.\d+\.[kv])\.(.+)")


class ArrayHeader(NamedTuple):
    """The dtype and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a calibration: its text and settings.

    `tokens_sha256` hashes the text's token ids (int32, little-endian). `loss` is the mean
    cross-entropy of the samples in nats per token.
    """

    text: str
    tokens_sha256: str
    samples: int
    length: int
    seed: int
    dtype: str
    loss: float


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Calibrated parameters of a cache's layers and sides.

    Args:
        spec: the cache spec that was calibrated, with the options that the calibration decided.
        dims: the model's dimensions.
        model_fingerprint: the model's `partial_fingerprint` (fingerprint.py).
        keys: the options that each side of a layer ("layers.0.k") was fitted for.
        origin: the text and the settings.
        tensors: the arrays by name ("layers.0.k.name").
    """

    spec: str
    dims: CacheDims
    model_fingerprint: str
    keys: Mapping[str, str]
    origin: Origin
    tensors: Mapping[str, np.ndarray]

    def serves(self, side: Side) -> bool:
        """Return True if some layer has parameters for this side."""
        return any(name.endswith(f".{side}") for name in self.keys)

    def parameters(self, layer: int, side: Side) -> dict[str, np.ndarray]:
        """Return the arrays of one side of one layer by name, or {} if it has none."""
        prefix = f"layers.{layer}.{side}."
        return {
            name.removeprefix(prefix): array
            for name, array in self.tensors.items()
            if name.startswith(prefix)
        }


Given = Calibration | str | os.PathLike[str]  # a calibration or its file


def resolved(spec: CacheSpec | str, calibration: Calibration) -> CacheSpec:
    """Return the spec with the options filled in that it leaves open and a calibration decides
    (waterfill's widths).

    Args:
        spec: a spec or its text.
        calibration: a calibration for that spec; it serves the result too.

    Everything that follows from a spec, sizes included, follows from the resolved one: pass that
    one to `prepare` and to the cache. A spec without open options comes back as it is.
    """
    spec = parse(spec)
    filled = [
        method.fitted(_of_sides(calibration, sides), calibration.dims)
        for method, sides in _methods(spec)
    ]
    return dataclasses.replace(spec, k=filled[0], v=filled[-1])


def predicted_divergence(spec: CacheSpec | str, calibration: Calibration) -> float | None:
    """Return the KL divergence in nats per token that a calibration predicts for tokens read from
    the body, to second order. Return None if the method of a side cannot predict it."""
    predicted = [
        m.predicted_divergence(_of_sides(calibration, sides), calibration.dims)
        for m, sides in _methods(parse(spec))
    ]
    known = [divergence for divergence in predicted if divergence is not None]
    # the fit has gradients of the mean loss, the divergence needs the sum's
    return sum(known) * calibration.origin.length**2 if len(known) == len(predicted) else None


def _methods(spec: CacheSpec) -> tuple[tuple[Method, tuple[Side, ...]], ...]:
    """Return each method of a spec with the sides it serves."""
    return ((spec.k, ("k", "v")),) if spec.k == spec.v else ((spec.k, ("k",)), (spec.v, ("v",)))


def _of_sides(
    calibration: Calibration, sides: tuple[Side, ...]
) -> dict[Side, list[dict[str, np.ndarray]]]:
    """Return the parameters of every layer, by side. Sides without parameters are left out."""
    layers = range(calibration.dims.num_hidden_layers)
    return {
        side: [calibration.parameters(layer, side) for layer in layers]
        for side in sides
        if calibration.serves(side)
    }


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration to a file, which appears whole or not at all. Equal calibrations give
    equal bytes."""
    header = {
        "format": FORMAT,
        "format_version": VERSION,
        "spec": calibration.spec,
        "dims": calibration.dims.to_json(),
        "model_fingerprint": calibration.model_fingerprint,
        "keys": json.dumps(dict(calibration.keys)),
        **{name: str(value) for name, value in dataclasses.asdict(calibration.origin).items()},
    }
    save_tensors(path, calibration.tensors, header)


def check_calibration(
    spec: CacheSpec,
    config: ModelDims,
    calibration: Given | None,
    model_fingerprint: str | None = None,
) -> Calibration | None:
    """Return the checked calibration for `spec`, or None if it needs none. Raises as `prepare`
    does.

    Without `model_fingerprint`, everything but the weights is compared.
    """
    if calibration is None:
        if needs(spec, config):
            raise ValueError(f"{str(spec)!r} needs a calibration: {calibration_hint(spec)}")
        return None
    if not isinstance(calibration, Calibration):
        return read_calibration(calibration, spec, config, model_fingerprint)
    check_tensors("a calibration in memory", calibration, spec, config, model_fingerprint)
    return calibration


def calibration_hint(spec: CacheSpec) -> str:
    return (
        f"make one with kvq calibrate MODEL --text FILE --cache '{spec}' --out F.safetensors, then"
        " give --calibration F.safetensors"
    )


def calibrated_spec(path: str | os.PathLike[str]) -> CacheSpec:
    """Return the spec in the header of a calibration's file, which says nothing about its tensors.
    Raises ValueError, in one line, if the file is not a calibration."""
    with _opened(Path(path)) as file:
        return parse(_described(Path(path), file.metadata() or {}).spec)


def read_calibration(
    path: str | os.PathLike[str], spec: CacheSpec, config: ModelDims, model_fingerprint: str | None
) -> Calibration:
    """Read a calibration as `load_calibration` does, for a model whose weights need not be loaded:
    a fingerprint of None is not compared."""
    path, where = Path(path), repr(str(path))
    needed = _needed(where, spec, config)
    if not path.is_file():
        raise FileNotFoundError(f"calibration {where} is not a file")
    with _opened(path) as file:
        calibration = _described(path, file.metadata() or {})
        stored = {name: _array(file.get_slice(name)) for name in list(file.keys())}
        names = check(where, calibration, stored, spec, config, model_fingerprint)
        tensors = read_tensors(file, where)
    tensors = {name: tensors[name] for name in names}
    calibration = dataclasses.replace(
        calibration, keys={name: calibration.keys[name] for name in needed}, tensors=tensors
    )
    check_tensors(where, calibration, spec, config, model_fingerprint)
    return calibration


def check(
    where: str,
    calibration: Calibration,
    stored: Mapping[str, ArrayHeader],
    spec: CacheSpec,
    config: ModelDims,
    model_fingerprint: str | None,
) -> list[str]:
    """Return the names of the tensors that `spec` needs, all of them in `stored`. Raise ValueError,
    in one line, naming what differs."""
    dims, needed = dims_of(config), _needed(where, spec, config)
    if calibration.dims != dims:
        raise ValueError(
            f"{where} was calibrated for another model: {_difference(calibration.dims, dims)}"
        )
    if model_fingerprint not in (None, calibration.model_fingerprint):
        raise ValueError(
            f"{where} was calibrated for another model of the same size: fingerprint"
            f" {calibration.model_fingerprint[:12]}, and this model has"
            f" {str(model_fingerprint)[:12]}: calibrate this one"
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
        f"{name}.{parameter}": ArrayHeader(described.dtype, described.shape)
        for name, need in needed.items()
        for parameter, described in need.parameters.items()
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
    """Run `check` on the tensors of a calibration, and check that float tensors are finite."""
    stored = {
        name: ArrayHeader(tensor.dtype.name, tensor.shape)
        for name, tensor in calibration.tensors.items()
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
    stored: Mapping[str, ArrayHeader],
    promised: Mapping[str, ArrayHeader],
    keys: Mapping[str, str],
    needed: Mapping[str, Need],
) -> None:
    """Compare stored tensors with expected ones. Tensors of other layers and sides are allowed if
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
    if header.get("format_version") != VERSION:
        raise ValueError(
            f"{str(path)!r} has format_version={header.get('format_version')!r}; this version of"
            f" kvq reads {VERSION!r}: calibrate again"
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
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r}: header field {field}={header.get(field)!r} cannot be read"
            ) from error

    return Calibration(
        spec=read("spec", str),
        dims=read("dims", CacheDims.from_json),
        model_fingerprint=read("model_fingerprint", str),
        keys=read("keys", _texts),
        origin=Origin(**{field: read(field, reader) for field, reader in readers.items()}),
        tensors={},
    )


def _texts(text: str) -> dict[str, str]:
    return {str(name): str(options) for name, options in dict(parse_json(text)).items()}


def _array(tensor: Any) -> ArrayHeader:
    dtype = str(tensor.get_dtype())
    return ArrayHeader(DTYPES.get(dtype, dtype), tuple(tensor.get_shape()))


def _difference(stored: CacheDims, asked: CacheDims) -> str:
    field = next(
        f.name
        for f in dataclasses.fields(CacheDims)
        if getattr(stored, f.name) != getattr(asked, f.name)
    )
    return f"{field} {getattr(stored, field)}, and this model has {getattr(asked, field)}"
