"""Read and write tensor files with a checksum: safetensors whose header holds a sha256 of
everything else in the file.

    sha256( JSON of [ header without the checksum, sorted;
                      (name, dtype, shape, sha256 of the bytes) of each tensor, sorted ] )

So it detects a damaged tensor, a changed header field, and tensors that have changed places. It
detects damage, not forgery: a checksum is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvq_jax.files.whole import replacing

SHA256 = "kvq_sha256"  # the header's field
DTYPES = {  # that NumPy reads back from a file, by their safetensors names
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


class NoChecksum(UserWarning):
    """A file of an older version has no checksum."""


class Checksum:
    """The checksum of a file whose tensors are added one at a time, in any order."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, name: str, tensor: np.ndarray) -> None:
        self._tensors[name] = tensor.dtype.name, tensor.shape, sha256_of(tensor)

    def hexdigest(self, header: Mapping[str, str]) -> str:
        """Return the checksum of the tensors so far with a file's header, without the checksum in
        the header."""
        fields = sorted((field, value) for field, value in header.items() if field != SHA256)
        tensors = [(name, *self._tensors[name]) for name in sorted(self._tensors)]
        return hashlib.sha256(json.dumps([fields, tensors]).encode()).hexdigest()

    def check(self, where: str, header: Mapping[str, str], *, required: bool) -> None:
        """Raise ValueError, in one line, if a file's content does not match its checksum.

        A file without a checksum also raises if one is `required`. Otherwise the file is of an
        older version, and a warning says that damage would not be seen. `where` names the file.
        """
        if SHA256 not in header:
            if required:
                raise ValueError(f"{where} is damaged: its header has no checksum ({SHA256})")
            warnings.warn(
                f"{where} was written before files had checksums: damage would not be seen",
                NoChecksum,
                stacklevel=3,
            )
        elif header[SHA256] != self.hexdigest(header):
            raise ValueError(
                f"{where} is damaged: its content does not have the checksum ({SHA256}) that its"
                " header states"
            )


def sha256_of(tensor: np.ndarray) -> str:
    """Return the sha256 of an array's bytes, as 64 hex digits."""
    return hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data).hexdigest()


def read_tensor(file: Any, where: str, name: str) -> np.ndarray:
    """Return a tensor of an open safetensors file. Raise ValueError, in one line, if NumPy has no
    dtype for it. `where` names the file."""
    dtype = str(file.get_slice(name).get_dtype())
    if dtype not in DTYPES:
        raise ValueError(
            f"{where}: tensor {name} is {dtype}, which cannot be read; a file of kvq holds"
            f" {', '.join(DTYPES)}"
        )
    return file.get_tensor(name)


def read_tensors(file: Any, where: str) -> dict[str, np.ndarray]:
    """Return all tensors of an open safetensors file by their names. Raise as `read_tensor` and
    `Checksum.check`, which requires a checksum."""
    tensors, checksum = {}, Checksum()
    names = file.keys()
    for name in names:
        tensors[name] = read_tensor(file, where, name)
        checksum.add(name, tensors[name])
    checksum.check(where, file.metadata() or {}, required=True)
    return tensors


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], header: Mapping[str, str]
) -> None:
    """Write a safetensors file with these header fields and a checksum, whole or not at all. Equal
    contents give equal bytes."""
    with replacing(path) as unfinished:
        write_tensors(unfinished, tensors, header)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], header: Mapping[str, str]) -> None:
    """Write the file of `save_tensors` to a place that a kill may leave short."""
    checksum = Checksum()
    for name, tensor in tensors.items():
        checksum.add(name, tensor)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={**header, SHA256: checksum.hexdigest(header)})
    except SafetensorError as error:
        raise _system_error(error, path) from error
    path.chmod(mode)  # safetensors writes files that only their owner may read
    _sort_header(path)


def _system_error(error: SafetensorError, path: Path) -> Exception:
    """Return the OSError that safetensors names in words, or the error itself if it names none."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error


def _sort_header(path: Path) -> None:
    """Sort a file's header fields by name, in place: safetensors writes them in an order that
    changes from run to run."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "a sorted header is as long as before"
        file.seek(8)
        file.write(text.ljust(size))
