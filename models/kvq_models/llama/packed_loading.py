"""Choose which weights of a checkpoint stay packed, and read them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Container
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cpu_kernels.library import unavailable
from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.serialization import fingerprint_of
from kvq_models.llama import hf_names
from kvq_models.llama.gguf_file import GgufFile
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_experts import PackedExperts
from kvq_models.llama.packed_weights import (
    Activations,
    PackedMatrix,
    PackedTable,
    PackedWeight,
    dense,
    is_packed,
)
from kvq_models.llama.stored_tensor import NUMBERS
from kvq_models.llama.tabled_weights import TabledMatrix
from kvq_models.llama.tensor_names import EMBED_NAME

Weights: TypeAlias = Literal["packed", "dense"]


# Bytes of a checkpoint's matrices of 16 bits below which the default is to widen them: they stay in
# the processor's cache, so that a step does not wait for memory.
MIN_BYTES = 1 << 26


def packing(
    checkpoint: HfDirectory | GgufFile, weights: Weights | None, dtype: DTypeLike, *, on_mesh: bool
) -> Callable[[hf_names.Weight], bool]:
    """Return a function that tells the weights that stay packed: the projections, the embedding and
    the head, if the file stores them in a way that can be read packed and keeps their values.

    Args:
        weights: "packed", "dense", or None for packed ones on one CPU with native kernels, but for
            matrices of 16 bits that take less than MIN_BYTES together.

    Raises ValueError, in one line, if packed weights are asked for and cannot be had.
    """
    if weights is not None and weights not in get_args(Weights):
        raise ValueError(f"{weights=} must be 'packed' or 'dense'")
    if weights == "packed" and on_mesh:
        raise ValueError("weights='packed' is for one device: give 'dense' on a mesh")
    by_default = jax.default_backend() == "cpu" and not on_mesh and unavailable() is None
    if weights == "dense" or not (weights or by_default):
        return lambda _: False
    packable = {
        name
        for name, tensor in checkpoint.tensors.items()
        if checkpoint.packs(name) and _keeps_values(tensor.dtype, dtype)
    }
    wide = {name for name in packable if checkpoint.tensors[name].dtype in NUMBERS}
    size = sum(2 * math.prod(checkpoint.tensors[name].shape) for name in wide)
    chosen = packable if weights or size >= MIN_BYTES else packable - wide
    if weights and not chosen:
        raise ValueError(
            "weights='packed' is for GGUF files with blocks of 4 to 8 bits, for groups of integers,"
            " FP8 or NF4, for dense-and-sparse codes, and for matrices of 16 bits, and this"
            " checkpoint has none: give 'dense'"
        )
    layers_of_experts = _whole_layers(checkpoint, chosen)

    def packs(weight: hf_names.Weight) -> bool:
        if len(weight.spec.shape) == 3:
            return _layer(weight.name) in layers_of_experts
        return weight.name in chosen and (weight.transpose or weight.name == EMBED_NAME)

    return packs


def _keeps_values(stored: str, dtype: DTypeLike) -> bool:
    """Return True if numbers of 16 bits that a file stores have the same values in a dtype."""
    return stored not in NUMBERS or jnp.dtype(dtype).name in ("float32", NUMBERS[stored])


def _layer(name: str) -> str:
    return name.partition(".experts.")[0]


def _whole_layers(checkpoint: HfDirectory | GgufFile, chosen: Container[str]) -> set[str]:
    """Return the layers whose experts can all be packed, those of one projection in one way."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".experts." in name and not name.endswith("_bias"):
            kind = tensor.dtype if name in chosen else ""
            projection = re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
            kinds.setdefault(_layer(name), {}).setdefault(projection, set()).add(kind)
    return {
        layer
        for layer, by_projection in kinds.items()
        if all(len(stored) == 1 and "" not in stored for stored in by_projection.values())
    }


def read_packed(
    checkpoint: HfDirectory | GgufFile, weight: hf_names.Weight
) -> tuple[PackedWeight, bool]:
    """Return a weight that stays packed, and True if all of it is finite."""
    matrix, finite = checkpoint.packed(weight.stored_names, weight.leaf.dtype)
    if len(weight.spec.shape) == 3:
        return PackedExperts(matrix, count=weight.spec.shape[0]), finite
    return matrix if weight.transpose else PackedTable(matrix), finite


def with_activations(llama: Llama, activations: Activations) -> Llama:
    """Return the model, whose packed codes multiply activations as they are ("float32", whatever
    the model's dtype) or rounded to 8 bits ("int8"). Both models share their arrays.

    Raises ValueError, in one line, for another name, or if int8 is asked of a model without codes.
    """
    if activations not in get_args(Activations):
        raise ValueError(f"{activations=} must be 'float32' or 'int8'")
    leaves = jax.tree.leaves(llama, is_leaf=is_packed)
    if activations == "int8" and not any(is_packed(leaf) and leaf.integers for leaf in leaves):
        raise ValueError(
            "activations='int8' is for packed integers of 4 or 8 bits, and this model has none:"
            " give 'float32'"
        )

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, PackedMatrix):
            return dataclasses.replace(leaf, activations=activations)
        if isinstance(leaf, TabledMatrix):  # whose activations are never rounded
            return leaf
        return dataclasses.replace(leaf, matrix=changed(leaf.matrix)) if is_packed(leaf) else leaf

    return jax.tree.map(changed, llama, is_leaf=is_packed)


def holds_packed(llama: Llama) -> bool:
    return any(map(is_packed, jax.tree.leaves(llama, is_leaf=is_packed)))


def dense_llama(llama: Llama) -> Llama:
    """Return a model whose weights are all arrays, for what needs gradients or every value."""
    if not holds_packed(llama):
        return llama
    return jax.tree.map(dense, llama, is_leaf=is_packed)


def fingerprint(llama: Llama) -> str:
    """Return `kvq_jax.files.fingerprint` of the model with its weights as arrays, which is the same
    whether they are packed or not."""
    return fingerprint_of(map(dense, jax.tree.leaves(llama, is_leaf=is_packed)))


def in_words(llama: Llama) -> str:
    """Return how the weights are stored, and what that does to their values."""
    packed = [leaf for leaf in jax.tree.leaves(llama, is_leaf=is_packed) if is_packed(leaf)]
    size, dtype = sum(map(nbytes, packed)), llama.embed[...].dtype.name
    if not size:
        return dtype
    bits = sorted({leaf.bits for leaf in packed})
    rounds = any(leaf.activations == "int8" and leaf.integers for leaf in packed)
    rounded = ", rounded to int8 before products" if rounds else ""
    return (
        f"packed ({' and '.join(map(str, bits))} bits, {size / 1e6:.0f} MB, exactly the file's"
        f" values), activations {dtype}{rounded}"
    )
