"""The widths of waterfill's chunks: a row's sorted channels are cut into chunks of equal size, of
one width each.

A spec writes them as the digits of one number, the widest first: 43322110 stands for eight chunks,
the last of which is not stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from kvq_jax.arrays.reverse_water_filling import MAX_BITS, allocate
from kvq_jax.methods.base import head_dim_at
from kvq_jax.types.array_types import ModelDims

Parameters: TypeAlias = Mapping[str, np.ndarray]
Widths: TypeAlias = tuple[int, ...]

PROFILES = 4  # different widths in a model, at most (docs/decisions/calibration.md)
TEMPLATE_FALL = 4.0  # bits, from the strongest channel to the weakest, without a calibration
CHUNK = 8  # channels for each 64 of a head, which are 8 chunks


def chunk_energies(energies: Float[np.ndarray, "K n"], chunks: int) -> Float[np.ndarray, " chunks"]:
    """Return the energy of all heads together in each chunk of their sorted channels (or pairs)."""
    return energies.reshape(len(energies), chunks, -1).sum(axis=(0, 2), dtype=np.float64)


def widths_by_layer(
    layers: Sequence[Sequence[Parameters]],
    dims: ModelDims,
    share: Callable[[int, list[Sequence[Parameters]], int], list[list[Widths]]],
) -> list[list[Widths]]:
    """Return the widths of the sides of each layer. Layers of one head dim are compared with each
    other, since a chunk of theirs has the same number of channels.

    Layers without parameters stay in full precision, whatever their widths, so they take another
    layer's. Nothing is returned if no layer has any.

    Args:
        layers: the calibrated parameters of each side of each layer.
        dims: the model's dimensions.
        share: (head dim, the layers of it, the number of different widths that they may have) ->
            the widths of their sides.
    """
    known = [layer for layer, sides in enumerate(layers) if all(sides)]
    head_dims = {layer: head_dim_at(dims, layer) for layer in known}
    sizes = dict.fromkeys(head_dims.values())
    fitted: dict[int, list[Widths]] = {}
    for head_dim in sizes:
        alike = [layer for layer in known if head_dims[layer] == head_dim]
        profiles = max(1, PROFILES // len(sizes))
        widths = share(head_dim, [layers[layer] for layer in alike], profiles)
        fitted |= zip(alike, widths, strict=True)
    return [fitted.get(layer, fitted[known[0]]) for layer in range(len(layers)) if known]


def written(widths: Sequence[int] | Int[np.ndarray, " chunks"]) -> int:
    """Return widths as the number whose digits they are."""
    return int("".join(str(int(width)) for width in widths))


def parted(widths: Sequence[int], chunks: int) -> list[tuple[int, ...]]:
    """Return the widths of each side, of `chunks` digits, from those of all sides in a row. A side
    without bits takes one from the side with most, because a body of no bits cannot be stored."""
    sides = [list(widths[at : at + chunks]) for at in range(0, len(widths), chunks)]
    for side in sides:
        if not any(side):
            giver = max(sides, key=sum)
            giver[sum(map(bool, giver)) - 1] -= 1  # the last that has one: widths fall
            side[0] = 1
    return [tuple(side) for side in sides]


def read(name: str, number: int, head_dim: int) -> tuple[int, ...]:
    """Return the widths that a number stands for. Raises ValueError, in one line, naming the
    option, if it fits no row of H channels."""
    widths = tuple(map(int, str(number)))
    if head_dim % (2 * len(widths)):
        raise ValueError(
            f"{name}={number} cuts {head_dim} channels into {len(widths)} chunks, which are no"
            " whole RoPE pairs"
        )
    if any(a < b for a, b in itertools.pairwise(widths)) or widths[0] > MAX_BITS:
        raise ValueError(
            f"{name}={number} must be widths of at most {MAX_BITS} bits, the widest first: channels"
            " are sorted by energy"
        )
    return widths


def template_chunks(head_dim: int) -> int:
    """Return the number of chunks of a row whose widths the spec leaves open. A chunk has 8
    channels, 16 from head dim 128 on, 32 from 256."""
    return head_dim // math.gcd(head_dim, CHUNK * max(1, head_dim // 64))


def template(bits: float, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (widths of keys, widths of values) for `bits` stored bits of an element, the token's
    scale of 8 bits included.

    They suit energies that fall by a factor of 2^(2 TEMPLATE_FALL) from the first channel to the
    last. Raises ValueError if no bit is left for codes, or more than there can be.
    """
    chunks = template_chunks(head_dim)
    budget = math.floor(2 * chunks * (bits - 8 / head_dim) + 1e-6)
    if not 2 <= budget <= 2 * chunks * MAX_BITS:
        minimum, maximum = 1 / chunks + 8 / head_dim, MAX_BITS + 8 / head_dim
        raise ValueError(
            f"bits={bits:g} cannot be stored with heads of {head_dim} channels: between {minimum:g}"
            f" and {maximum:g} can"
        )
    energies = 4.0 ** (-TEMPLATE_FALL * (np.arange(chunks) + 0.5) / chunks)
    keys, values = (
        tuple(map(int, allocate(energies, share))) for share in (-(-budget // 2), budget // 2)
    )
    return keys, values
