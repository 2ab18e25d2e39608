"""The header of a GGUF file: metadata and the list of tensors. Values are decoded when they are
read, so opening a file costs milliseconds, whatever its vocabulary. A file that is cut off anywhere
is refused then.

    magic, version, number of tensors, number of fields
    fields      name, type, value; an array is a type, a length and its values
    tensors     name, dimensions (the fastest first), type, offset
    data        aligned to general.alignment

The gguf library's reader makes an object of every entry of a vocabulary, which takes 3 seconds for
49,152 tokens and more than 10 for 151,936.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvq_models.llama.stored_tensor import CheckpointError, lfs_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")  # length of a text, before its bytes
# Bytes of a block, by the number of its values and that of its type. The gguf library has them as
# GGML_QUANT_SIZES, and takes a third of a second to import.
_BLOCK_BYTES = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98}
    | {19: 50, 21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66},
}
BLOCK_SIZES = {
    kind: (values, size) for values, sizes in _BLOCK_BYTES.items() for kind, size in sizes.items()
}

Buffer = mmap.mmap


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """The header of a tensor. `shape` is in numpy's order, `kind` the number of its type, and
    `start` the position of its data in `buffer`. A part of a larger tensor is the `part`-th of
    several of its shape that lie one after the other from there."""

    file: Path
    buffer: Buffer
    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    part: int = 0


class GgufHeader:
    """The metadata and the tensors of one file.

    fields: the metadata by name. tensors: by their names in the file.
    """

    def __init__(self, path: Path) -> None:
        """Read a header. Raise CheckpointError, in one line, if the file is cut off, damaged, or
        not a GGUF file that this reader knows."""
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                reason = f": {pointer}" if (pointer := lfs_pointer(path)) else ""
                raise CheckpointError(f"{str(path)!r} is not a GGUF file{reason}")
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{str(path)!r} is cut off or damaged: {error}") from error

    def _read(self) -> None:
        version, tensors, fields = self._numbers("<IQQ", len(MAGIC))
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{str(self.path)!r} is a big-endian GGUF file, which is not supported: convert it"
                " with gguf-convert-endian of the gguf package"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{str(self.path)!r} is a GGUF file of version {version}; supported:"
                f" {', '.join(map(str, VERSIONS))}"
            )
        at = len(MAGIC) + struct.calcsize("<IQQ")
        positions: dict[str, tuple[int, int]] = {}
        for _ in range(fields):
            name, at = self._text(at)
            (kind,) = self._numbers("<I", at)
            if name in positions:
                raise CheckpointError(f"{str(self.path)!r} holds field {name!r} twice")
            positions[name] = (kind, at + 4)
            at = self._end(kind, at + 4)
        self.fields = GgufFields(self, positions)
        self._read_tensors(tensors, at)

    def _read_tensors(self, count: int, at: int) -> None:
        headers = []
        for _ in range(count):
            name, at = self._text(at)
            (rank,) = self._numbers("<I", at)
            if not 1 <= rank <= _MAX_DIMENSIONS:
                raise CheckpointError(
                    f"{str(self.path)!r} holds tensor {name!r} of {rank} dimensions"
                )
            *dimensions, kind, offset = self._numbers(f"<{rank}QIQ", at + 4)
            at += 4 + struct.calcsize(f"<{rank}QIQ")
            headers.append((name, tuple(dimensions[::-1]), kind, offset))
        alignment = self.fields.get("general.alignment", 32)
        powers = [1 << i for i in range(_MAX_ALIGNMENT.bit_length())]
        if type(alignment) is not int or alignment not in powers:
            raise CheckpointError(
                f"{str(self.path)!r} has general.alignment={alignment!r:.40}, which must be a power"
                f" of two up to {_MAX_ALIGNMENT}"
            )
        data = math.ceil(at / alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in headers:
            if name in self.tensors:
                raise CheckpointError(f"{str(self.path)!r} holds tensor {name!r} twice")
            # a type that the library does not know is refused when the tensor is read
            per_block, size = BLOCK_SIZES.get(kind, (1, 0))
            end = data + offset + math.prod(shape) // per_block * size
            if end > len(self._buffer):
                raise CheckpointError(
                    f"{str(self.path)!r} is cut off: tensor {name!r} ends at byte {end} of"
                    f" {len(self._buffer)}; download the file again"
                )
            self.tensors[name] = GgufTensor(
                self.path, self._buffer, name, shape, kind, data + offset
            )

    def value(self, kind: int, at: int) -> Any:
        """Return the value of a type at a position."""
        if kind == _STRING:
            return self._text(at)[0]
        if kind != _ARRAY:
            return self._numbers(f"<{self._scalar(kind)}", at)[0]
        kind, count = self._numbers("<IQ", at)
        at += 12
        if kind != _STRING:
            return list(self._numbers(f"<{count}{self._scalar(kind)}", at))
        return self._texts(at, range(count))

    def texts(self, kind: int, at: int, places: Sequence[int]) -> list[str]:
        """Return the texts at these places of an array, in order, and decode no others. Returns
        none of a value that is no array of texts, and none beyond its end."""
        if kind != _ARRAY:
            return []
        kind, count = self._numbers("<IQ", at)
        if kind != _STRING:
            return []
        return self._texts(at + 12, [place for place in places if place < count])

    def _texts(self, at: int, places: Sequence[int]) -> list[str]:
        texts: list[str] = []
        buffer, size, place = self._buffer, len(self._buffer), 0
        length = _LENGTH.unpack_from
        for chosen in places:  # hundreds of thousands: no calls that can be spared
            while place < chosen:
                at += 8 + length(buffer, at)[0]
                place += 1
            start = at + 8
            at = start + length(buffer, at)[0]
            place += 1
            if at > size:
                raise struct.error(f"a text ends at byte {at} of {size}")
            texts.append(buffer[start:at].decode())
        return texts

    def _end(self, kind: int, at: int) -> int:
        """Return the position after a value."""
        if kind == _STRING:
            return at + 8 + self._numbers("<Q", at)[0]
        if kind != _ARRAY:
            return at + struct.calcsize(f"<{self._scalar(kind)}")
        kind, count = self._numbers("<IQ", at)
        at += 12
        if kind != _STRING:
            return at + count * struct.calcsize(f"<{self._scalar(kind)}")
        buffer, length = self._buffer, _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length(buffer, at)[0]
        return at

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{str(self.path)!r} holds a field of the unknown type {kind}")
        return _SCALARS[kind]

    def _text(self, at: int) -> tuple[str, int]:
        """Return the text at a position, and the position after it."""
        (length,) = self._numbers("<Q", at)
        end = at + 8 + length
        if end > len(self._buffer):
            raise struct.error(f"a text of {length} bytes ends beyond the file")
        return self._buffer[at + 8 : end].decode(), end

    def _numbers(self, layout: str, at: int) -> tuple[Any, ...]:
        if at + struct.calcsize(layout) > len(self._buffer):
            raise struct.error(f"it ends at byte {len(self._buffer)}")
        return struct.unpack_from(layout, self._buffer, at)


class GgufFields(Mapping[str, Any]):
    """The metadata of a file. Each value is decoded once, when it is asked for."""

    def __init__(self, header: GgufHeader, positions: Mapping[str, tuple[int, int]]) -> None:
        self._header, self._positions = header, positions
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            with self._errors(name):
                self._values[name] = self._header.value(*self._positions[name])
        return self._values[name]

    def texts(self, name: str, places: Sequence[int]) -> list[str]:
        """Return the texts at some places of an array, in increasing order, and decode no others.
        Returns none if the field is missing or no array of texts."""
        if name not in self._positions:
            return []
        with self._errors(name):
            return self._header.texts(*self._positions[name], places)

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(
                f"{str(self._header.path)!r} holds a damaged field {name!r}: {error}"
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


_BLOCKS = 4096  # dequantized at a time: what stays in a processor's cache


def blocks_of(tensor: GgufTensor) -> np.ndarray:
    """Return the bytes of a tensor's blocks, [..., blocks of a row, bytes].

    Raises ValueError for a tensor whose type is unknown, or whose rows end within a block.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    per_block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    count = math.prod(tensor.shape)
    if tensor.shape and tensor.shape[-1] % per_block:
        raise ValueError(
            f"its row length {tensor.shape[-1]} is not a multiple of the block size {per_block}"
        )
    length = count // per_block * size
    start = tensor.start + tensor.part * length
    data = np.frombuffer(tensor.buffer, np.uint8, length, start)
    return data.reshape(*tensor.shape[:-1], -1, size)


def dequantized(tensor: GgufTensor, rows: np.ndarray | None = None) -> np.ndarray:
    """Return a tensor [...], or rows of it, as float32: exactly the numbers that its blocks encode.

    Raises as `blocks_of` does, and NotImplementedError for a type that the gguf library cannot
    dequantize.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind, blocks, shape = GGMLQuantizationType(tensor.kind), blocks_of(tensor), tensor.shape
    if rows is not None:
        blocks, shape = blocks[rows], (len(rows), *shape[1:])
    per_block, size = GGML_QUANT_SIZES[kind]
    count, data = math.prod(shape), blocks.reshape(-1)
    length = len(data)
    if kind == GGMLQuantizationType.F32:
        return data.view("<f4").astype(np.float32).reshape(shape)
    values = np.empty(count, np.float32)
    for first in range(0, length, _BLOCKS * size):
        part = data[first : first + _BLOCKS * size]
        start, stop = first // size * per_block, (first + len(part)) // size * per_block
        values[start:stop] = dequantize(part[None], kind)[0]
    return values.reshape(shape)
