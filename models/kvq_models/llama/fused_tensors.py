"""Tensors that a family stores in one piece or in another order, and this model apart: slices of
them under names of their own.

    Phi-3      qkv_proj = [q_proj; k_proj; v_proj], gate_up_proj = [gate_proj; up_proj]
    Granite 4  shared_mlp.input_linear = [gate_proj; up_proj], output_linear = down_proj
    gpt-oss    columns of gate_up_proj are gate and up in turns; all experts are one tensor

Heads that rotate in part (Phi-4-mini) store the R rotated channels first. RoPE pairs are
(i, i + H/2) here, so the rows of their q_proj and k_proj are put in the order

    0 .. R/2, R .. (R + H)/2, R/2 .. R, (R + H)/2 .. H

in which the pairs of rotated channels come first. Scores are sums over channels, in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.rope_config import rotary_dim
from kvq_models.llama.stored_tensor import CheckpointError, StoredTensor


class HeadOrder(NamedTuple):
    """The order of the rows of a head of which `rotated` channels rotate: as stored, those are the
    first, and here RoPE's pairs are half a head apart. Made when a head's rows are there: a
    configuration may state any size."""

    rotated: int
    channels: int

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of whole heads in the order of this model."""
        return self._reordered(rows, self._order())

    def undone(self, rows: np.ndarray) -> np.ndarray:
        """Return such rows in the order in which they are stored."""
        return self._reordered(rows, np.argsort(self._order()))

    def _order(self) -> np.ndarray:
        first, second = np.split(np.arange(self.rotated), 2)
        still = np.split(np.arange(self.rotated, self.channels), 2)
        return np.concatenate([first, still[0], second, still[1]])

    def _reordered(self, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, self.channels, *rows.shape[1:])[:, order].reshape(rows.shape)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a stored tensor along one axis, and the order of its rows if that differs."""

    stored: str
    name: str
    axis: int
    part: slice
    order: HeadOrder | None = None

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """Return the part of the stored tensor."""
        part = tensor[(slice(None),) * (self.axis % tensor.ndim) + (self.part,)]
        return part if self.order is None else self.order.of(part)

    def put(self, tensor: np.ndarray, part: np.ndarray) -> None:
        """Write the part into the stored tensor."""
        if self.order is not None:
            part = self.order.undone(part)
        tensor[(slice(None),) * (self.axis % tensor.ndim) + (self.part,)] = part

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part from that of the stored tensor."""
        axis = self.axis % len(stored)
        length = len(range(stored[axis])[self.part])
        return (*stored[:axis], length, *stored[axis + 1 :])


def slices(config: LlamaConfig, stored: Container[str] | None = None) -> dict[str, Slice]:
    """Return the slices of a model by their names.

    stored: the names of a checkpoint's tensors. Those that it does not have, it stores apart.
    """
    pieces = (
        piece
        for i in range(config.num_hidden_layers)
        for piece in _of_layer(config, f"model.layers.{i}.")
    )
    return {piece.name: piece for piece in pieces if stored is None or piece.stored in stored}


def _of_layer(config: LlamaConfig, layer: str) -> Iterator[Slice]:
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    width_q = config.num_attention_heads * config.head_dim
    width_kv = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    if config.model_type == "phi3":
        at, rotated = 0, rotary_dim(config.rope, config.head_dim)
        partly = HeadOrder(rotated, config.head_dim) if rotated < config.head_dim else None
        for name, width in (("q", width_q), ("k", width_kv), ("v", width_kv)):
            stored, part = f"{attention}qkv_proj.weight", slice(at, at + width)
            order = None if name == "v" else partly
            yield Slice(stored, f"{attention}{name}_proj.weight", 0, part, order)
            at += width
        stored = f"{mlp}gate_up_proj.weight"
        yield Slice(stored, f"{mlp}gate_proj.weight", 0, slice(inner))
        yield Slice(stored, f"{mlp}up_proj.weight", 0, slice(inner, 2 * inner))
    if config.model_type == "granitemoehybrid":
        stored, output = (f"{layer}shared_mlp.{end}put_linear.weight" for end in ("in", "out"))
        yield Slice(stored, f"{mlp}gate_proj.weight", 0, slice(inner))
        yield Slice(stored, f"{mlp}up_proj.weight", 0, slice(inner, 2 * inner))
        yield Slice(output, f"{mlp}down_proj.weight", 0, slice(None))
    if config.model_type == "gpt_oss":
        for end in ("", "_bias"):
            stored = f"{mlp}experts.gate_up_proj{end}"
            yield Slice(stored, f"{mlp}experts.gate_proj{end}", -1, slice(0, None, 2))
            yield Slice(stored, f"{mlp}experts.up_proj{end}", -1, slice(1, None, 2))


def apart(
    stored: Mapping[str, StoredTensor], pieces: Mapping[str, Slice]
) -> dict[str, StoredTensor]:
    """Return headers with the slices in place of the tensors that hold them. A tensor that is not
    there has no slices. Raise CheckpointError for one without axes."""
    headers = dict(stored)
    for piece in pieces.values():
        headers.pop(piece.stored, None)
    for name, piece in pieces.items():
        if (tensor := stored.get(piece.stored)) is not None:
            if not tensor.shape:
                raise CheckpointError(
                    f"tensor {piece.stored!r} is a single number, and {name!r} is a part of it"
                )
            shape, named = piece.shape(tensor.shape), tensor.stored_as or piece.stored
            headers[name] = dataclasses.replace(tensor, shape=shape, stored_as=named)
    return headers


def joined(config: LlamaConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors by name as the family stores them. A slice that is not among them is stored
    apart, in its bits."""
    pieces = {name: piece for name, piece in slices(config).items() if name in tensors}
    stored: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for piece in pieces.values():
        part = tensors[piece.name]
        sizes[piece.stored] = sizes.get(piece.stored, 0) + part.shape[piece.axis]
    for name, tensor in tensors.items():
        piece = pieces.get(name)
        if piece is None:
            stored[name] = tensor
            continue
        if piece.stored not in stored:
            shape = list(tensor.shape)
            shape[piece.axis] = sizes[piece.stored]
            stored[piece.stored] = np.empty(shape, tensor.dtype)
        piece.put(stored[piece.stored], tensor)
    return stored
