"""Save caches and load them. Each is one safetensors file, whose header describes the cache.

    header   format "kvq-cache", version, spec text, dims, batch, capacity, dtype, fingerprints of
             the model and of the method parameters, and a checksum of all the rest
             (kvq_jax/files/checksum.py), which files of version 1 do not have. Files of versions
             1 and 2 do not say which codes remain from a trim: none
    tensors  one for each leaf, named by its path: layers.0.body.k.words.0, layers.0.ring.v,
             lengths. Also the arrays that a program keeps beside the cache: beside.tokens

A file comes from outside. Nothing in it is trusted before it agrees with `layout(...)`, the tree
that the header promises, and nothing is returned before its checksum is verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from kvq_jax.cache.cache import Cache, axes, check_cache, check_held, layout, row_dtype
from kvq_jax.cache.dims import dims_of
from kvq_jax.cache.moving import deals, orders, placers
from kvq_jax.cache.saved_header import VERSION, WITHOUT_CHECKSUM, read_header, write_header
from kvq_jax.cache.spec import CacheSpec, parse
from kvq_jax.files.checksum import DTYPES, Checksum, read_tensor, save_tensors
from kvq_jax.placement.placement import Placement
from kvq_jax.placement.processes import fetched, in_first
from kvq_jax.types.array_types import ModelDims, Tree

BESIDE = "beside."


def fingerprint(tree: Tree) -> str:
    """Return the sha256 of a tree's arrays as 64 hex digits: dtype, shape and bytes of every leaf,
    in tree order.

    Copies every array to the host. If several processes hold parts of them, all must call this.

    Args:
        tree: a tree of arrays, such as a model's weights or the method parameters.

    Raises:
        ValueError: if the tree was consumed.
    """
    check_held(tree, "this tree of arrays")
    return fingerprint_of(jax.tree.leaves(tree))


def fingerprint_of(leaves: Iterable[Any]) -> str:
    """Return the `fingerprint` of a tree with these leaves, of which one exists at a time."""
    digest = hashlib.sha256()
    for leaf in leaves:
        array = fetched(leaf)
        digest.update(f"{array.dtype.name}{np.shape(leaf)}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def save_cache(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    model_fingerprint: str = "",
    parameters_fingerprint: str = "",
    beside: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a cache to a file, bit for bit. The file appears complete or not at all.

    A cache on a mesh is written as one device would hold it, so any placement can load it. If
    several processes hold it, all must call this: the first one writes, all wait for it, and
    all raise if it cannot.

    Args:
        cache: the cache.
        path: the file to write or replace.
        model_fingerprint: the `fingerprint` of the model that filled the cache.
        parameters_fingerprint: the `fingerprint` of the method parameters that quantized it.
        beside: other arrays to keep in the file, such as the tokens that the cache holds, which
            `load_beside` reads.

    Raises:
        ValueError: in one line, if the cache was consumed, if a fingerprint is not text, or if a
            file cannot hold the model's sizes or an array beside the cache.
        OSError: if the file cannot be written.
    """
    check_cache(cache)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(cache)):
        raise ValueError("this cache is traced: return it from the jitted function, and save that")
    header = write_header(cache, model_fingerprint, parameters_fingerprint)
    kept = dict(_kept(beside or {}))
    tensors = {
        name: order(leaf)
        for (name, leaf), order in zip(_named(cache).items(), orders(cache), strict=True)
    }
    tensors |= kept
    in_first(lambda: save_tensors(path, tensors, header), path)


def _kept(beside: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and arrays that a file holds of `beside`. Raise ValueError, in one line, for
    an array that could not be read from it."""
    for name, value in beside.items():
        if not isinstance(name, str):
            raise ValueError(
                f"the names of beside must be text, got {name!r} of {type(name).__name__}"
            )
        array = np.asarray(value)
        if array.dtype.name not in DTYPES.values():
            raise ValueError(
                f"{BESIDE}{name} must be an array of numbers, got {array.dtype.name}, which a file"
                f" cannot give back; convert it to one of {', '.join(DTYPES.values())}"
            )
        # safetensors writes memory as it lies: a transposed array would come back in another order
        little = array.dtype.newbyteorder("<")
        yield BESIDE + name, array.astype(little, order="C", copy=False)


def load_cache(
    path: str | os.PathLike[str],
    *,
    spec: CacheSpec | str | None = None,
    config: ModelDims | None = None,
    capacity: int | None = None,
    dtype: DTypeLike | None = None,
    model_fingerprint: str | None = None,
    parameters_fingerprint: str | None = None,
    placement: Placement | None = None,
) -> Cache:
    """Return the cache that `save_cache` wrote, bit for bit.

    The file must agree with every argument that is not None. The host holds one array at a time
    beside the parts of its devices. A file of an older version, without a checksum, is loaded with
    a warning.

    Args:
        path: the file.
        spec: the expected spec, or its text.
        config: the expected model's config, or its `CacheDims`.
        capacity: the expected capacity, in tokens.
        dtype: the expected dtype of full-precision rows.
        model_fingerprint: the expected `fingerprint` of the model.
        parameters_fingerprint: the expected `fingerprint` of the method parameters.
        placement: the placement of the loaded cache on a mesh, whatever it was when it was saved,
            or None for one device.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: in one line, if the file cannot be read, if it differs from an argument, if a
            tensor is missing, unknown, or has another shape or dtype than the header promises, or
            if the content does not match its checksum.
    """
    path = pathlib.Path(path)
    expected = {
        "spec": spec and parse(spec),
        "dims": config and dims_of(config),
        "capacity": capacity,
        "dtype": None if dtype is None else row_dtype(config, dtype),
        "model_fingerprint": model_fingerprint,
        "parameters_fingerprint": parameters_fingerprint,
    }
    with _opened(path) as file:
        header = file.metadata() or {}
        fields = read_header(path, header, len(file.keys()))
        for field, value in expected.items():
            if value is not None and value != fields[field]:
                raise ValueError(
                    f"{str(path)!r} holds a cache with another {field}: {_show(fields[field])},"
                    f" expected {_show(value)}"
                )
        promised = _promised(path, fields)
        cache, counts = _read(path, file, header, promised, placement)
    _check_counts(path, cache, counts)
    return cache


def saved_layout(path: str | os.PathLike[str]) -> Cache:
    """Return the layout of the cache in a file: its spec, dims, rows and capacity, as the header
    says.

    Reads only the header. `load_cache` verifies the rest.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: in one line, if the header cannot be read or does not describe a cache.
    """
    path = pathlib.Path(path)
    with _opened(path) as file:
        return _promised(path, read_header(path, file.metadata() or {}, len(file.keys())))


def load_beside(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the arrays that `save_cache` kept beside the cache, by name.

    `load_cache` verifies the checksum of the whole file. This function does not.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: in one line, if the file, or an array in it, cannot be read.
    """
    with _opened(pathlib.Path(path)) as file:
        return {
            name.removeprefix(BESIDE): read_tensor(file, repr(str(path)), name)
            for name in _beside(file)
        }


def _beside(file: Any) -> list[str]:
    names = file.keys()
    return [name for name in names if name.startswith(BESIDE)]


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    """Open a safetensors file. Raise FileNotFoundError if there is none, ValueError if it cannot be
    read."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not a file")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{str(path)!r} is not a readable safetensors file: {str(error).splitlines()[0]}"
            ) from None
        yield file


def _promised(path: pathlib.Path, fields: dict[str, Any]) -> Cache:
    try:
        return layout(
            fields["spec"], fields["dims"], fields["batch"], fields["capacity"], fields["dtype"]
        )
    # sizes that no method expects raise ArithmeticError or LookupError
    except (ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{str(path)!r}: the header does not describe a cache: {error}") from None


def _read(
    path: pathlib.Path,
    file: Any,
    header: dict[str, str],
    promised: Cache,
    placement: Placement | None,
) -> tuple[Cache, dict[str, np.ndarray]]:
    """Return the cache of an open file, and its counts of tokens by tensor name. Raise ValueError
    if the tensors are not those of `promised`, or differ from the checksum."""
    described = axes(
        promised.spec, promised.dims, promised.batch, promised.capacity, promised.dtype, placement
    )
    structs, tensors, checksum, counts = _named(promised), [], Checksum(), {}
    saved = {
        name: struct
        for name, struct in structs.items()
        if header["format_version"] == VERSION or not name.endswith(".intact")
    }
    _compare(path, file, saved)
    for (name, struct), deal, place in zip(
        structs.items(), deals(promised, placement), placers(described), strict=True
    ):
        if name in saved:
            tensor = file.get_tensor(name)
            checksum.add(name, tensor)
        else:
            tensor = np.zeros(struct.shape, struct.dtype)
        if name.endswith((".intact", ".floor")):
            counts[name] = tensor
        tensors.append(place(deal(tensor)))
    for name in _beside(file):
        checksum.add(name, read_tensor(file, repr(str(path)), name))
    checksum.check(repr(str(path)), header, required=header["format_version"] != WITHOUT_CHECKSUM)
    return jax.tree.unflatten(jax.tree.structure(described), tensors), counts


def _check_counts(path: pathlib.Path, cache: Cache, counts: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless all counts of tokens are between 0 and the cache's capacity."""
    if bool(jnp.any((cache.lengths < 0) | (cache.lengths > cache.capacity))):
        raise ValueError(
            f"{str(path)!r}: lengths are not between 0 and the capacity {cache.capacity}:"
            f" {cache.lengths.tolist()}"
        )
    for name, tokens in counts.items():
        if np.any((tokens < 0) | (tokens > cache.capacity)):
            raise ValueError(
                f"{str(path)!r}: {name} is not between 0 and the capacity {cache.capacity}:"
                f" {tokens.tolist()}"
            )


def _compare(path: pathlib.Path, file: Any, promised: dict[str, jax.ShapeDtypeStruct]) -> None:
    stored = set(file.keys()) - set(_beside(file))
    for name in sorted(stored ^ promised.keys()):
        raise ValueError(
            f"{str(path)!r}: tensor {name} is {'unknown' if name in stored else 'missing'}"
        )
    for name, struct in promised.items():
        tensor = file.get_slice(name)
        shape, dtype = tuple(tensor.get_shape()), DTYPES.get(tensor.get_dtype(), tensor.get_dtype())
        if (shape, dtype) != (struct.shape, struct.dtype.name):
            raise ValueError(
                f"{str(path)!r}: tensor {name} is {dtype}{list(shape)}, expected"
                f" {struct.dtype.name}{list(struct.shape)}"
            )


def _named(cache: Cache) -> dict[str, Any]:
    """Return the leaves of a cache, or of its layout, by path, such as layers.0.body.k.words.0."""
    return {
        ".".join(_steps(cache, path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
    }


def _steps(cache: Cache, path: tuple[Any, ...]) -> list[str]:
    """Return a path's steps as text. Within a layer they are `layers`, its number, a field, the
    side, and the codec's own names."""
    steps = [
        str(getattr(entry, "name", getattr(entry, "idx", getattr(entry, "key", ""))))
        for entry in path
    ]
    if len(steps) > 3:
        steps[3] = cache.plans[int(steps[1])].names[int(steps[3])]
    return steps


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
