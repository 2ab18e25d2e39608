"""Reverse water-filling: widths for channels whose energies are known, and how a spec writes them.

    minimize  sum_i w_i D(b_i)     subject to   sum_i b_i <= budget,   b_i in 0 .. 8

D(b) is the mean squared error of the best uniform quantizer of 2^b levels for a normal variable of variance 1, D(0) = 1. D is convex, so
the greedy rule, which gives the next bit to the channel that gains most from it, is optimal.

A row's channels are sorted by energy and cut into chunks of equal size, of one width each. A spec writes the widths of the chunks as the
digits of one number, the widest first: 43322110 stands for eight chunks, the last of which is not stored.

Source: Cover and Thomas, Elements of Information Theory, section 10.3.3; steps and errors: Max (1960), Table II.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

# of the best uniform quantizer of 2^b levels, b = 0 .. 8, for a normal variable of variance 1
STEPS = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.0003043, 0.00008769)
MOST = len(STEPS) - 1
TEMPLATE_FALL = 4.0  # bits, from the strongest channel to the weakest, where nothing was calibrated
CHUNK = 8  # channels for each 64 of a head, which are 8 chunks


def allocate(energies: Float[np.ndarray, " n"], budget: int) -> Int[np.ndarray, " n"]:
    """Return the widths of n items that cost one unit for each bit: the optimum for these energies and this budget."""
    widths = np.zeros(len(energies), np.int64)
    gain = -np.diff(ERRORS)
    heap = [(-energy * gain[0], item) for item, energy in enumerate(energies)]
    heapq.heapify(heap)
    for _ in range(min(budget, MOST * len(energies))):
        _, item = heap[0]
        widths[item] += 1
        if widths[item] == MOST:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-energies[item] * gain[widths[item]], item))
    return widths


def chunk_energies(energies: Float[np.ndarray, "K n"], chunks: int) -> Float[np.ndarray, " chunks"]:
    """Return what all heads together have in each chunk of their sorted channels (or pairs)."""
    heads = len(energies)
    return energies.reshape(heads, chunks, -1).sum(axis=(0, 2), dtype=np.float64)


def written(widths: Sequence[int] | Int[np.ndarray, " chunks"]) -> int:
    """Return widths as the number whose digits they are."""
    return int("".join(str(int(width)) for width in widths))


def read(name: str, number: int, head_dim: int) -> tuple[int, ...]:
    """Return the widths that a number stands for. Raises ValueError, in one line, naming the option, where it fits no row of H channels."""
    digits = str(number)
    if head_dim % (2 * len(digits)):
        raise ValueError(f"{name}={number} cuts {head_dim} channels into {len(digits)} chunks, which are no whole RoPE pairs")
    widths = tuple(map(int, digits))
    if any(a < b for a, b in itertools.pairwise(widths)) or widths[0] > MOST:
        raise ValueError(f"{name}={number} must be widths of at most {MOST} bits, the widest first: channels are sorted by energy")
    return widths


def layer_widths(
    chunks: Sequence[Sequence[Float[np.ndarray, " chunks"]]], budgets: Sequence[int], profiles: int
) -> list[list[tuple[int, ...]]]:
    """Return widths for each layer and each of its sides from the energies of their chunks: at most `profiles` different ones in all.

    Layers of equal widths share compiled programs, and the spec stays short. Every layer's own optimum is a candidate; of these, the set is
    chosen greedily that least increases the layers' errors, each relative to its optimum and summed over sides.
    """
    own = [[tuple(map(int, allocate(side, budget))) for side, budget in zip(sides, budgets, strict=True)] for sides in chunks]
    candidates = list(dict.fromkeys(map(tuple, own)))
    errors = np.array([[list(map(expected_error, sides, one)) for one in candidates] for sides in chunks])  # layers, candidates, sides
    excess = (errors / errors.min(axis=1, keepdims=True)).sum(axis=-1)
    chosen: list[int] = []
    while len(chosen) < min(profiles, len(candidates)):
        so_far = excess[:, chosen].min(axis=1, initial=np.inf)
        chosen.append(int(np.minimum(excess, so_far[:, None]).sum(axis=0).argmin()))
    return [list(candidates[chosen[int(costs.argmin())]]) for costs in excess[:, chosen]]


def expected_error(energies: Float[np.ndarray, " chunks"], widths: Sequence[int]) -> float:
    """Return sum_i w_i D(b_i)."""
    return float(energies @ np.asarray(ERRORS)[list(widths)])


def template_chunks(head_dim: int) -> int:
    """Return the chunks of a row whose widths the spec leaves open: of 8 channels, or of 16 from a head dim of 128 on, 32 from 256, and so
    on, where the head's width allows."""
    return head_dim // math.gcd(head_dim, CHUNK * max(1, head_dim // 64))


def template(bits: float, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (widths of keys, widths of values) for `bits` stored bits of an element, the token's scale of 8 bits included.

    They are those of energies that fall by a factor of 2^(2 TEMPLATE_FALL) from the first channel to the last. Raises ValueError where no
    bit is left for codes, or more than there can be.
    """
    chunks = template_chunks(head_dim)
    budget = math.floor(2 * chunks * (bits - 8 / head_dim) + 1e-6)
    if not 2 <= budget <= 2 * chunks * MOST:
        least, most = 1 / chunks + 8 / head_dim, MOST + 8 / head_dim
        raise ValueError(f"bits={bits:g} cannot be stored with heads of {head_dim} channels: between {least:g} and {most:g} can")
    energies = 4.0 ** (-TEMPLATE_FALL * (np.arange(chunks) + 0.5) / chunks)
    keys, values = (tuple(map(int, allocate(energies, share))) for share in (-(-budget // 2), budget // 2))
    return keys, values
