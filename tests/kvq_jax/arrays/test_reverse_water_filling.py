"""Reverse water-filling: its table of quantizers, its optimum, and the few widths that many layers
share."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from kvq_jax.arrays.reverse_water_filling import ERRORS, MAX_BITS, STEPS, allocate, layer_widths

PEAK = 0.797884560802865  # of the best quantizer of one bit: the mean of |x|


def test_steps_are_those_of_the_best_uniform_quantizers():
    x = np.linspace(-8, 8, 160_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])

    def error(width: int, step: float) -> float:
        top = 2 ** (width - 1)
        return float(
            (density * (x - (np.clip(np.floor(x / step), -top, top - 1) + 0.5) * step) ** 2).sum()
        )

    assert error(1, STEPS[1]) == pytest.approx(1 - PEAK**2, rel=1e-4)
    for width in range(1, MAX_BITS + 1):
        step, minimum = STEPS[width], ERRORS[width]
        assert error(width, step) == pytest.approx(minimum, rel=5e-3), f"{width} bits"
        assert min(error(width, 0.97 * step), error(width, 1.03 * step)) > error(width, step), (
            f"{width} bits"
        )


@pytest.mark.parametrize("budget", [0, 1, 5, 9])
def test_the_greedy_allocation_is_optimal(budget: int):
    energies = np.array([9.0, 3.0, 0.4, 0.1])

    def cost(widths: Iterable[int]) -> float:
        return sum(e * ERRORS[w] for e, w in zip(energies, widths, strict=True))

    every = [widths for widths in itertools.product(range(7), repeat=4) if sum(widths) == budget]
    found = allocate(energies, budget)
    assert found.sum() == budget
    assert cost(found) == pytest.approx(min(map(cost, every)), rel=1e-12)


def test_more_bits_than_there_can_be_fill_every_channel():
    assert (allocate(np.ones(3), 1000) == MAX_BITS).all()


def test_layers_share_few_widths_that_cost_little_more_than_their_own():
    falls = np.linspace(0.2, 4, 12)
    chunks = [[2.0 ** (-fall * np.arange(8)), 2.0 ** (-fall * np.arange(8) / 2)] for fall in falls]

    def errors(widths: list[list[tuple[int, ...]]]) -> np.ndarray:
        """Return each side's error of each layer, relative to that of widths of its own."""
        cost = [
            [float(e @ np.asarray(ERRORS)[list(w)]) for e, w in zip(*layer, strict=True)]
            for layer in zip(chunks, widths, strict=True)
        ]
        minimum = [
            [float(e @ np.asarray(ERRORS)[allocate(e, 16)]) for e in layer] for layer in chunks
        ]
        return np.asarray(cost) / minimum

    means = []
    for profiles in (1, 2, 4, 12):
        widths = layer_widths(chunks, (16, 16), profiles)
        assert len({tuple(layer) for layer in widths}) <= profiles
        assert all(sum(side) == 16 for layer in widths for side in layer)
        means.append(errors(widths).mean())
    assert means[-1] == pytest.approx(1, rel=1e-12)
    assert means[0] > 1.1, "these layers would not need widths of their own"
    assert means == sorted(means, reverse=True)
    assert means[2] < 1.1
