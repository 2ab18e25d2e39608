"""Choose which weights of a checkpoint stay packed, and read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax

from cpu_kernels.library import unavailable
from kvq_jax.cache.accounting import nbytes
from kvq_jax.cache.serialization import fingerprint_of
from kvq_models.llama import hf_names
from kvq_models.llama.gguf_file import GgufFile
from kvq_models.llama.hf_directory import HfDirectory
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_weights import (
    Activations,
    PackedMatrix,
    PackedTable,
    dense,
    is_packed,
)

Weights: TypeAlias = Literal["packed", "dense"]


def packing(
    checkpoint: HfDirectory | GgufFile, weights: Weights | None, *, on_mesh: bool
) -> Callable[[hf_names.Weight], bool]:
    """Return a function that tells the weights that stay packed: the layers' projections, the
    embedding and the head, if the file stores blocks that can be read packed.

    Args:
        checkpoint: the open checkpoint.
        weights: "packed", "dense", or None for packed ones on one CPU with native kernels.
        on_mesh: True if the weights go to a mesh of devices.

    Raises ValueError, in one line, if packed weights are asked for and cannot be had.
    """
    if weights is not None and weights not in get_args(Weights):
        raise ValueError(f"{weights=} must be 'packed' or 'dense'")
    if weights == "packed" and on_mesh:
        raise ValueError("weights='packed' is for one device: give 'dense' on a mesh")
    by_default = jax.default_backend() == "cpu" and not on_mesh and unavailable() is None
    if weights == "dense" or not (weights or by_default):
        return lambda _: False

    def packs(weight: hf_names.Weight) -> bool:
        matrix = weight.transpose or weight.name == hf_names.EMBED_NAME
        return matrix and isinstance(checkpoint, GgufFile) and checkpoint.packs(weight.name)

    if weights == "packed" and not (
        isinstance(checkpoint, GgufFile) and any(map(checkpoint.packs, checkpoint.tensors))
    ):
        raise ValueError(
            "weights='packed' is for GGUF files with blocks of 4 to 8 bits, and this checkpoint has"
            " none: give 'dense'"
        )
    return packs


def read_packed(
    checkpoint: HfDirectory | GgufFile, weight: hf_names.Weight
) -> tuple[PackedMatrix | PackedTable, bool]:
    """Return a weight that stays packed, and True if all of it is finite."""
    assert isinstance(checkpoint, GgufFile), "packing() chooses only weights of such files"
    matrix, finite = checkpoint.packed(weight.name, weight.leaf.dtype)
    return matrix if weight.transpose else PackedTable(matrix), finite


def with_activations(llama: Llama, activations: Activations) -> Llama:
    """Return the model, whose packed weights multiply activations as they are ("float32", whatever
    the model's dtype) or rounded to 8 bits ("int8"). Both models share their arrays.

    Raises ValueError, in one line, for another name, or if int8 is asked of a model without packed
    weights.
    """
    if activations not in get_args(Activations):
        raise ValueError(f"{activations=} must be 'float32' or 'int8'")
    if activations == "int8" and not holds_packed(llama):
        raise ValueError(
            "activations='int8' is for packed weights, and this model has none: give 'float32'"
        )

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, PackedTable):
            return dataclasses.replace(leaf, matrix=changed(leaf.matrix))
        if isinstance(leaf, PackedMatrix):
            return dataclasses.replace(leaf, activations=activations)
        return leaf

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
    leaves = jax.tree.leaves(llama, is_leaf=is_packed)
    size = sum(nbytes(leaf) for leaf in leaves if is_packed(leaf))
    dtype = llama.embed[...].dtype.name
    if not size:
        return dtype
    packed = [leaf for leaf in leaves if is_packed(leaf)]
    bits = sorted({leaf.bits for leaf in packed})
    rounds = any(leaf.activations == "int8" for leaf in packed)
    rounded = ", rounded to int8 before products" if rounds else ""
    return (
        f"packed ({' and '.join(map(str, bits))} bits, {size / 1e6:.0f} MB, exactly the file's"
        f" values), activations {dtype}{rounded}"
    )
