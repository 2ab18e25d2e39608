"""Reverse water-filling: sharing out a budget of bits over independent normal variables.

    minimize  sum_i w_i D(b_i)     subject to   sum_i b_i <= budget,   b_i in 0 .. 8

D(b) is the mean squared error of the best uniform quantizer of 2^b levels for a normal variable of
variance 1, D(0) = 1. D is convex, so the greedy rule, which gives the next bit to the variable that
gains most from it, is optimal. So it is for any other convex D, which may take its place.

Source: Cover and Thomas, Elements of Information Theory, section 10.3.3; steps and errors: Max
(1960), Table II.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

# Steps of the best uniform quantizer of 2^b levels, b = 0 .. 8, for a normal variable of variance 1
STEPS = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.0003043, 0.00008769)
MAX_BITS = len(STEPS) - 1


def allocate(
    energies: Float[np.ndarray, " n"],
    budget: int,
    errors: Sequence[float] = ERRORS,
    minimum: int = 0,
) -> Int[np.ndarray, " n"]:
    """Return the optimal widths of n items with energies w, if an item costs one unit for each bit
    and the sum is at most the budget. No item has fewer than `minimum` bits.

    errors: D(b) for b = 0 .. 8, convex.
    """
    widths = np.full(len(energies), minimum, np.int64)
    gain = -np.diff(errors)
    heap = [(-energy * gain[minimum], item) for item, energy in enumerate(energies)]
    heapq.heapify(heap)
    for _ in range(min(budget, MAX_BITS * len(energies)) - minimum * len(energies)):
        _, item = heap[0]
        widths[item] += 1
        if widths[item] == MAX_BITS:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-energies[item] * gain[widths[item]], item))
    return widths


def expected_error(
    energies: Float[np.ndarray, " n"], widths: Sequence[int], errors: Sequence[float] = ERRORS
) -> float:
    """Return sum_i w_i D(b_i)."""
    return float(energies @ np.asarray(errors)[list(widths)])


def layer_widths(
    energies: Sequence[Sequence[Float[np.ndarray, " n"]]],
    budgets: Sequence[int],
    profiles: int,
    errors: Sequence[float] = ERRORS,
    minimum: int = 0,
) -> list[list[tuple[int, ...]]]:
    """Return widths for each layer and each of its sides, from the energies of their items.

    There are at most `profiles` different ones, so that layers share compiled programs and the spec
    stays short. Every layer's optimum is a candidate. Candidates are chosen greedily to increase
    the layers' errors least, each relative to its optimum and summed over sides.
    """
    optima = [
        [
            tuple(map(int, allocate(side, budget, errors, minimum)))
            for side, budget in zip(sides, budgets, strict=True)
        ]
        for sides in energies
    ]
    candidates = list(dict.fromkeys(map(tuple, optima)))
    # [layers, candidates, sides]
    costs = np.array(
        [
            [
                [expected_error(*side, errors) for side in zip(sides, one, strict=True)]
                for one in candidates
            ]
            for sides in energies
        ]
    )
    excess = (costs / costs.min(axis=1, keepdims=True)).sum(axis=-1)
    chosen: list[int] = []
    while len(chosen) < min(profiles, len(candidates)):
        so_far = excess[:, chosen].min(axis=1, initial=np.inf)
        chosen.append(int(np.minimum(excess, so_far[:, None]).sum(axis=0).argmin()))
    return [list(candidates[chosen[int(row.argmin())]]) for row in excess[:, chosen]]
