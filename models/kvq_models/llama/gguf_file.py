"""Read GGUF files: one file with metadata, tokenizer and tensors. A tensor is dequantized when it
is read.

The file is memory-mapped: the host holds one tensor at a time in float32. Values are exactly the
file's: a 4-bit matrix loads as the numbers that its blocks encode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvq_models.llama import gguf_metadata, gguf_tokenizer
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor, first_line

MAGIC = b"GGUF"


class GgufFile:
    """An open GGUF file: its header is read and checked, its tensors are not."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raise CheckpointError, in one line, if it is truncated, not a GGUF file, or
        has tensors of an unreadable type."""
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{str(path)!r} is not a GGUF file")
        from gguf import GGUFReader  # imported late: only GGUF files need it

        with self._errors("is cut off, damaged, or holds what this reader does not know"):
            reader = GGUFReader(path)
            self.fields: Mapping[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
            self._tensors = {gguf_metadata.hf_name(t.name) or t.name: t for t in reader.tensors}

    @functools.cached_property
    def config(self) -> LlamaConfig:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return gguf_metadata.config_of(
            self.fields, shapes, lambda: self._dequantized(gguf_metadata.ROPE_FACTORS)
        )

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors' headers by Hugging Face name. A tensor without one keeps its GGUF
        name."""
        return {
            name: StoredTensor(
                self.path, tuple(int(n) for n in reversed(t.shape)), t.tensor_type.name
            )
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Return a tensor by its Hugging Face name, in Hugging Face's orientation and order of
        rows, in float32."""
        tensor, heads = self._dequantized(name), gguf_metadata.has_swapped_rows(self.config, name)
        return gguf_metadata.unswapped(tensor, heads) if heads else tensor

    def parts(self, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Return a function that returns parts of one tensor, which is read and dequantized as a
        whole."""
        whole = self.read(name)
        return lambda index: whole[index]

    def tokenizer(self) -> Any:
        """Return the tokenizer, or None if the file has none. Raise CheckpointError for an
        unsupported kind."""
        try:
            return gguf_tokenizer.tokenizer_of(self.fields)
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"the tokenizer in {str(self.path)!r} cannot be loaded: {first_line(error)}"
            ) from error

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer as the files that transformers reads."""
        if (tokenizer := self.tokenizer()) is not None:
            tokenizer.save_pretrained(directory)

    def _dequantized(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        with self._errors(
            f"holds tensor {tensor.name!r} of type {tensor.tensor_type.name}, which cannot be read"
        ):
            from gguf import dequantize

            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

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
