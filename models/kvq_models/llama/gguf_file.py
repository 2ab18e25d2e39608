"""Read GGUF files: metadata, tokenizer and tensors, in one file or in the parts of a split one. A
tensor is dequantized, or packed, when it is read.

Files are memory-mapped: the host holds one tensor at a time in float32. Values are exactly the
file's: a 4-bit matrix loads as the numbers that its blocks encode.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvq_models.llama import fused_tensors, gguf_metadata, gguf_names, gguf_tokenizer
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.config_fields import fields_named
from kvq_models.llama.gguf_fields import CONFIG_NAMES
from kvq_models.llama.gguf_header import GgufHeader, GgufTensor, blocks_of, dequantized
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor, first_line


class GgufFile:
    """An open GGUF file, or all parts of a split one: headers are read and checked, tensors are
    not."""

    def __init__(self, path: Path) -> None:
        """Open a file, or all parts of a split one by any of them. Raise CheckpointError, in one
        line, if a file is damaged, of another kind, or missing."""
        parts = _parts(path)
        self.path, self.fields = parts[0].path, parts[0].fields
        self.nbytes = sum(part.path.stat().st_size for part in parts)
        kind = self.fields.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(
                f"{str(path)!r} has general.type={kind!r}; supported: model (a file with all"
                " weights of a language model)"
            )
        architecture = str(self.fields.get("general.architecture"))
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in (tensor for part in parts for tensor in part.tensors.values()):
            for name, named in gguf_names.named(tensor, architecture):
                if name in self._tensors:
                    other = self._tensors[name]
                    raise CheckpointError(
                        f"tensor {tensor.name!r} is in both {other.file.name!r} and"
                        f" {tensor.file.name!r}"
                        if other.name == tensor.name
                        else f"{tensor.file.name!r} holds both {other.name!r} and {tensor.name!r}"
                    )
                self._tensors[name] = named

    @functools.cached_property
    def config(self) -> LlamaConfig:
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        architecture = self.fields.get("general.architecture")
        names = {name: f"{architecture}.{key}" for name, key in CONFIG_NAMES.items()}
        with fields_named(names, "GGUF"):
            return gguf_metadata.config_of(self.fields, shapes, self._dequantized)

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors' headers by Hugging Face name. A tensor without one keeps its GGUF
        name."""
        from gguf import GGMLQuantizationType  # imported late: only GGUF files need it

        with self._errors("holds a tensor that cannot be read"):
            headers = {
                name: StoredTensor(t.file, _hf_shape(name, t), GGMLQuantizationType(t.kind).name)
                for name, t in self._tensors.items()
            }
        return fused_tensors.apart(headers, self._slices)

    @functools.cached_property
    def _slices(self) -> dict[str, fused_tensors.Slice]:
        return fused_tensors.slices(self.config, self._tensors)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor by its Hugging Face name, in Hugging Face's orientation and order of
        rows, in float32."""
        if (piece := self._slices.get(name)) is not None:
            return piece.of(self._dequantized(piece.stored))
        return gguf_names.in_hf_form(self.config, name, self._dequantized(name))

    def packs(self, name: str) -> bool:
        """Return True if a tensor can be read packed: a matrix, rows of one, or the matrices of all
        experts, of blocks that `gguf_blocks.KINDS` knows."""
        from kvq_models.llama.gguf_blocks import KINDS, is_whole  # imported late: it needs JAX

        stored, piece = self.tensors.get(name), self._slices.get(name)
        if stored is None or stored.dtype not in KINDS or (piece is not None and piece.axis != 0):
            return False
        shape = stored.shape if piece is not None else self._tensors[name].shape
        return is_whole(shape, experts=".experts." in name)

    def packed(self, names: Sequence[str], dtype: Any) -> tuple[Any, bool]:
        """Return a tensor that `packs`, by its Hugging Face name, as a PackedMatrix [in, out] whose
        values are the file's, and True if all of it is finite. The outputs of several tensors, or
        of all experts in one, lie behind each other."""
        from kvq_models.llama.gguf_blocks import packed_matrix  # imported late: it needs JAX

        name = names[0]
        if ".experts." in name:
            return self._packed_experts(names, dtype)
        piece, heads = self._slices.get(name), gguf_names.swapped_heads(self.config, name)
        tensor = self._tensors[name if piece is None else piece.stored]
        rows, order = np.arange(tensor.shape[0]), None
        if piece is not None:
            order = piece.of(rows)
        elif heads:
            order = gguf_names.unswapped(rows, heads)
        with self._errors(f"holds tensor {tensor.name!r}, which cannot be read"):
            return packed_matrix(blocks_of(tensor), self.tensors[name].dtype, order, dtype)

    def _packed_experts(self, names: Sequence[str], dtype: Any) -> tuple[Any, bool]:
        from kvq_models.llama.gguf_blocks import packed_matrix  # imported late: it needs JAX

        tensors, kind = [self._tensors[name] for name in names], self.tensors[names[0]].dtype
        first = tensors[0]
        with self._errors(f"holds tensor {first.name!r}, which cannot be read"):
            if all((t.file, t.start) == (first.file, first.start) for t in tensors):
                # parts of one tensor, or all experts of a family that names them together
                shape = first.shape if len(tensors) == 1 else (len(tensors), *first.shape)
                blocks = blocks_of(dataclasses.replace(first, shape=shape, part=0))
            else:
                blocks = np.stack([blocks_of(tensor) for tensor in tensors])
            return packed_matrix(blocks.reshape(-1, *blocks.shape[-2:]), kind, None, dtype)

    def parts(self, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that returns parts of one tensor. Of a matrix, their rows alone are
        dequantized, and other tensors as a whole."""
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor.shape) != 2 or name in self._slices:
            whole = self.read(name)
            return lambda index: whole[index]
        order, heads = np.arange(tensor.shape[0]), gguf_names.swapped_heads(self.config, name)
        if heads:
            order = gguf_names.unswapped(order, heads)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            return self._dequantized(name, order[index[0]])[(slice(None), *index[1:])]

        return read

    def tokenizer(self) -> Any:
        """Return the tokenizer, or None if the file has none. Raise CheckpointError for a broken
        one, and for an unsupported kind."""
        try:
            core = self._core
            return None if core is None else gguf_tokenizer.tokenizer_of(self.fields, core)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CheckpointError(
                f"the tokenizer in {str(self.path)!r} cannot be loaded: {first_line(error)}"
            ) from error

    @functools.cached_property
    def _core(self) -> Any:
        return gguf_tokenizer.core_of(self.fields)

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer as the files that transformers reads."""
        if (tokenizer := self.tokenizer()) is not None:
            tokenizer.save_pretrained(directory)

    def _dequantized(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        tensor = self._tensors[name]
        with self._errors(f"holds tensor {tensor.name!r}, which cannot be read"):
            return dequantized(tensor, rows)

    @contextmanager
    def _errors(self, task: str) -> Iterator[None]:
        """Turn any exception that the library raises over a damaged file into a CheckpointError of
        one line."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{str(self.path)!r} {task}: {first_line(error)}") from error


def _hf_shape(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    shape = tensor.shape
    return (shape[0], *shape[:0:-1]) if gguf_names.is_transposed(name) else shape


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def pattern_of_parts(name: str) -> str:
    """Return the glob pattern of all parts of a split file, or of the file alone."""
    part = _PART.fullmatch(name)
    if part is None:
        return glob.escape(name)
    return f"{glob.escape(part[1])}-?????{glob.escape(name[part.end(2) :])}"


def _parts(path: Path) -> list[GgufHeader]:
    """Return the headers of a file, or of all parts of a split one, the part with the metadata
    first."""
    header = GgufHeader(path)
    count = header.fields.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [header]
    name = _PART.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{str(path)!r} is a part of a split GGUF file of {count} parts, and its name does not"
            f" say which: parts are named NAME-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{str(path)!r} is a part of a split GGUF file of {count} parts, of which"
            f" {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''} are missing beside"
            " it"
        )
    headers = [header if part == path else GgufHeader(part) for part in paths]
    for number, part in enumerate(headers):
        stated = (part.fields.get("split.no"), part.fields.get("split.count"))
        if stated != (number, count):
            raise CheckpointError(
                f"{str(part.path)!r} states split.no={stated[0]} and split.count={stated[1]}, and"
                f" its name part {number} of {count}"
            )
    return headers
