"""The tensors that a checkpoint stores for one quantized weight, and the checks of their types and
shapes."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor

FLOATS = ("F32", "F16", "BF16")
GROUP = 32  # inputs that share a scale of a packed matrix


@dataclasses.dataclass(frozen=True)
class StoredParts:
    """The tensors of a module by the end of their names (`qweight`, `scales`)."""

    module: str
    headers: Mapping[str, StoredTensor]
    read_stored: Callable[[StoredTensor], np.ndarray]

    def __contains__(self, end: str) -> bool:
        return end in self.headers

    def read(self, end: str) -> np.ndarray:
        """Return a tensor as it is stored."""
        return self.read_stored(self.headers[end])

    def floats(self, end: str) -> np.ndarray:
        """Return a tensor in float32."""
        return self.read(end).astype(np.float32)

    def shape(self, end: str, dtypes: tuple[str, ...], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor. Raise CheckpointError if it is missing, of another type, or
        of another rank."""
        name, header = f"{self.module}.{end}", self.headers.get(end)
        if header is None:
            raise CheckpointError(
                f"the files lack tensor {name!r}, which the quantized weight of {self.module!r}"
                " needs"
            )
        if header.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name!r} is stored as {header.dtype}; supported: {', '.join(dtypes)}"
            )
        if rank is not None and len(header.shape) != rank:
            raise CheckpointError(
                f"tensor {name!r} has shape {header.shape}, and its layout asks for {rank} axes"
            )
        return header.shape

    def check(self, end: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError if a tensor is missing, of another type, or of none of these
        shapes."""
        shape = self.shape(end, dtypes)
        if shape not in shapes:
            raise CheckpointError(
                f"tensor {self.module + '.' + end!r} has shape {shape}, and the weight and"
                f" quantization_config ask for {' or '.join(map(str, dict.fromkeys(shapes)))}"
            )

    def groups(self, size: int, group_size: int) -> int:
        """Return the number of groups of a weight's `size` inputs, one if group_size is -1. Raise
        CheckpointError if they are not whole."""
        if group_size == -1:
            return 1
        if size % group_size:
            raise CheckpointError(
                f"the weight of {self.module!r} has {size} inputs, which are not whole groups of"
                f" the {group_size} that quantization_config states"
            )
        return size // group_size

    def group_index(self, end: str, groups: int) -> np.ndarray:
        """Return the group of each input. Raise CheckpointError if there is no such group."""
        index = self.read(end)
        if index.size and not 0 <= index.min() <= index.max() < groups:
            raise CheckpointError(
                f"tensor {self.module + '.' + end!r} holds groups {index.min()} to {index.max()},"
                f" and the scales have {groups} groups"
            )
        return index


class Layout(abc.ABC):
    """The tensors in which a weight [out, in] is stored."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[str, ...]:
        """Return the ends of the tensors' names, first the one that every quantized weight has."""

    def name(self, module: str) -> str:
        """Return the name of the weight of a module."""
        return f"{module}.weight"

    @abc.abstractmethod
    def shape(self, parts: StoredParts) -> tuple[int, ...]:
        """Return the shape of the weight, from headers and tensors of a few bytes. Raise
        CheckpointError, in one line, for tensors that do not fit together."""

    @abc.abstractmethod
    def dequantized(self, parts: StoredParts) -> np.ndarray:
        """Return the weight [out, in] in float32. `shape` has checked the tensors."""

    def packs(self, parts: StoredParts) -> bool:
        """Return True if a packed matrix has the values of `grouped`. Reads tensors of groups at
        most."""
        return False

    def grouped(self, parts: StoredParts) -> GroupedCodes:
        """Return the weight without dequantizing it."""
        raise NotImplementedError


class GroupedLayout(Layout):
    """The tensors of a weight whose groups of inputs share scales and zeros."""

    @abc.abstractmethod
    def grouped(self, parts: StoredParts) -> GroupedCodes: ...

    def dequantized(self, parts: StoredParts) -> np.ndarray:
        return self.grouped(parts).dequantized()

    def has_whole_groups(self, parts: StoredParts, scales: str, axis: int) -> bool:
        """Return True if the scales, whose groups lie along an axis, are those of whole runs of
        GROUP inputs."""
        return self.shape(parts)[1] % (GROUP * parts.headers[scales].shape[axis]) == 0
