"""The seam between a checkpoint's files and its model: every quantized weight is one tensor of
floats, whatever the files store for it, or stays in its bits."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from kvq_models.llama.quantized.dense_and_sparse import DenseAndSparse, TabledRows
from kvq_models.llama.quantized.groups import GroupedCodes
from kvq_models.llama.quantized.mxfp4 import Mxfp4
from kvq_models.llama.quantized.quantization_config import Quantization
from kvq_models.llama.quantized.stored_parts import FLOATS, Layout, StoredParts
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor

# Scales of activations and of the KV cache. Activations are not quantized here, and a cache has
# scales of its own.
_OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_scale_ub|input_zero_point|activation_scale|output_scale"
    r"|output_zero_point)|.*\.self_attn\.(.+\.)?(q|k|v|kv|prob)_(scale|zero_point)"
)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] that a checkpoint stores in several tensors."""

    layout: Layout
    parts: StoredParts

    @property
    def header(self) -> StoredTensor:
        """Return the header of the weight as one tensor, after all its tensors are checked."""
        codes = self.parts.headers[self.layout.ends[0]]
        return StoredTensor(codes.file, self.layout.shape(self.parts), codes.dtype)

    def read(self) -> np.ndarray:
        """Return the weight in float32."""
        return self.layout.dequantized(self.parts)

    @property
    def packs(self) -> bool:
        """True if the weight can stay packed: by `blocks` if it is MXFP4, by `tabled` if it
        `has_tables`, else by `grouped`."""
        return isinstance(self.layout, Mxfp4) or self.layout.packs(self.parts)

    def blocks(self) -> np.ndarray:
        """Return a weight of MXFP4 in GGUF's blocks."""
        assert isinstance(self.layout, Mxfp4), "no other layout has these blocks"
        return self.layout.blocks(self.parts)

    @property
    def has_tables(self) -> bool:
        """True if each output has levels of its own."""
        return isinstance(self.layout, DenseAndSparse)

    def tabled(self) -> TabledRows:
        """Return a weight that `has_tables`."""
        assert isinstance(self.layout, DenseAndSparse), "no other layout has these tables"
        return self.layout.tabled(self.parts)

    def grouped(self) -> GroupedCodes:
        """Return another weight that `packs`."""
        return self.layout.grouped(self.parts)


def gathered(
    stored: Mapping[str, StoredTensor],
    quantization: Quantization | None,
    read_stored: Callable[[StoredTensor], np.ndarray],
) -> tuple[dict[str, StoredTensor], dict[str, QuantizedWeight]]:
    """Return (headers with one tensor for each weight, the quantized weights by name).

    A weight that the files store in floats is not quantized. Raises CheckpointError for tensors of
    a weight that do not fit together, and for a quantized weight that the configuration leaves out.
    """
    if quantization is None:
        return dict(stored), {}
    headers = {name: t for name, t in stored.items() if not _OF_ACTIVATIONS.fullmatch(name)}
    if any(isinstance(layout, Mxfp4) for _, layout in quantization.layouts):
        headers = dict(_with_dots(name, tensor) for name, tensor in headers.items())
    quantized: dict[str, QuantizedWeight] = {}
    for module, parts in _modules(headers, quantization).items():
        layout = quantization.layout_of(module)
        codes = None if layout is None else parts.get(layout.ends[0])
        if layout is None or codes is None or codes.dtype in (*FLOATS, "F64"):
            continue
        if quantization.ignores(module):
            raise CheckpointError(
                f"tensor {module + '.' + layout.ends[0]!r} is quantized ({codes.dtype}), and"
                " quantization_config leaves its module out"
            )
        used = {end: parts[end] for end in layout.ends if end in parts}
        weight = QuantizedWeight(layout, StoredParts(module, used, read_stored))
        for end in used:
            del headers[f"{module}.{end}"]
        quantized[layout.name(module)] = weight
        headers[layout.name(module)] = weight.header
    return headers, quantized


def _with_dots(name: str, tensor: StoredTensor) -> tuple[str, StoredTensor]:
    """Return a tensor of MXFP4, named gate_up_proj_blocks, as the part of a module."""
    dotted = re.sub(r"_(blocks|scales)$", r".\1", name)
    if dotted == name:
        return name, tensor
    return dotted, dataclasses.replace(tensor, stored_as=tensor.stored_as or name)


def _modules(
    headers: Mapping[str, StoredTensor], quantization: Quantization
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of each module by the end of their names, with the names in the file."""
    ends = sorted({end for _, layout in quantization.layouts for end in layout.ends}, key=len)
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, header in headers.items():
        for end in ends[::-1]:
            if name.endswith(f".{end}"):
                kept = dataclasses.replace(header, stored_as=header.stored_as or name)
                modules[name.removesuffix(f".{end}")][end] = kept
                break
    return modules
