"""The header of a saved cache: text fields that say what cache the file's tensors are.

A header of a few bytes can ask for any work: methods share out bits over the channels of a head, or
list its divisors. So the sizes in it are bounded before anything is computed with them.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp

from kvq_jax.cache.cache import Cache
from kvq_jax.cache.dims import SIZES, CacheDims
from kvq_jax.cache.method_text import MAX_LAYERS
from kvq_jax.cache.spec import parse

FORMAT = "kvq-cache"
VERSION, WITHOUT_INTACT, WITHOUT_CHECKSUM = "3", "2", "1"
# several times what published models have; a layout of these sizes takes a second at most
LARGEST = CacheDims(
    num_hidden_layers=MAX_LAYERS,
    num_attention_heads=1 << 16,
    num_key_value_heads=1 << 16,
    head_dim=1 << 12,
    hidden_size=1 << 20,
)


def write_header(
    cache: Cache, model_fingerprint: str, parameters_fingerprint: str
) -> dict[str, str]:
    """Return the header's fields of a cache. Raise ValueError, in one line, if `read_header` would
    refuse them."""
    fingerprints = {
        "model_fingerprint": model_fingerprint,
        "parameters_fingerprint": parameters_fingerprint,
    }
    for name, text in fingerprints.items():
        if not isinstance(text, str):
            raise ValueError(
                f"{name} must be the text of kvq.files.fingerprint, or '' for none, got"
                f" {type(text).__name__}"
            )
    _check_largest("the model of this cache", cache.dims)
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "spec": str(cache.spec),
        "dims": cache.dims.to_json(),
        "batch": str(cache.batch),
        "capacity": str(cache.capacity),
        "dtype": cache.dtype,
        **fingerprints,
    }


def read_header(path: pathlib.Path, header: dict[str, str], tensors: int) -> dict[str, Any]:
    """Return the header's fields as values. Raise ValueError, in one line, if one is missing or
    makes no sense."""
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} is not a saved cache: its header has format={header.get('format')!r},"
            f" not {FORMAT!r}"
        )
    if header.get("format_version") not in (VERSION, WITHOUT_INTACT, WITHOUT_CHECKSUM):
        raise ValueError(
            f"{str(path)!r} has format_version={header.get('format_version')!r}; this version reads"
            f" {WITHOUT_CHECKSUM!r} to {VERSION!r}: if a newer kvq wrote the file, install that one"
        )
    readers = {
        "spec": parse,
        "dims": CacheDims.from_json,
        "batch": int,
        "capacity": int,
        "dtype": lambda text: jnp.dtype(text).name,
        "model_fingerprint": str,
        "parameters_fingerprint": str,
    }
    fields = {}
    for field, read in readers.items():
        try:
            fields[field] = read(header[field])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{str(path)!r}: header field {field}={header.get(field)!r} cannot be read"
            ) from None
    sizes = {name: getattr(fields["dims"], name) for name in SIZES}
    if (
        not all(isinstance(size, int) and size > 0 for size in sizes.values())
        or sizes["num_hidden_layers"] > tensors
    ):
        raise ValueError(
            f"{str(path)!r}: header field dims={sizes} does not describe a model of this file's"
            f" {tensors} tensors"
        )
    _check_largest(f"{str(path)!r}: header field dims", fields["dims"])
    return fields


def _check_largest(where: str, dims: CacheDims) -> None:
    """Raise ValueError, which begins with `where`, if a size is larger than a file's may be."""
    sizes = [(name, getattr(dims, name)) for name in SIZES]
    for kv_heads, head_dim in dims.layer_heads:
        sizes += [("num_key_value_heads", kv_heads), ("head_dim", head_dim)]
    for name, size in sizes:
        # `layout` refuses what is not an integer before it computes with it
        if isinstance(size, int) and size > getattr(LARGEST, name):
            raise ValueError(
                f"{where} has {name}={size}; a saved cache has at most {getattr(LARGEST, name)}"
            )
