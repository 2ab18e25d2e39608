"""Share out a budget of bits over the layers and sides of a model by their costs.

    minimize    sum over layers l and sides s of cost_ls(n_ls)
    subject to  sum stored_l n_ls <= budget
    cost_ls(n) = ratio_ls(n) * energy_ls(n)

n counts the bits of the chunks of a row (the sum of the digits of `k_widths`), stored_l the tokens
that a layer keeps of a sequence: few in a layer with a sliding window. energy_ls(n) is the
divergence that waterfill's calibration predicts for its best widths with n bits. ratio_ls is the
measured over the predicted divergence if the side was measured; in between, its logarithm is
interpolated in n. The costs of layers and sides are assumed to add up. A price per bit turns the
budget into an independent choice for each layer and side, and is found by bisection.

Measured ratios are those of few windows. Widths that are the best for them pay for their noise on
others, so before a budget is shared out, the logarithms of a side's ratios are moved towards their
mean over layers at the same bits (docs/decisions/planner.md).

A model has at most PROFILES different pairs of widths, because layers of equal widths share
compiled programs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from kvq_jax.arrays.reverse_water_filling import MAX_BITS, allocate, expected_error
from kvq_jax.codecs.codec import Side
from kvq_jax.methods.waterfill.widths import chunk_energies, template_chunks
from kvq_models.calibration.file import Calibration

PROFILES = 6
KEPT = 0.8  # share that stays of a ratio's distance from the mean over layers, in logarithms
SIDES: tuple[Side, Side] = ("k", "v")
HALVINGS = 60

Widths = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of sides in nats per token. energies [L, 2, chunks]: from the calibration; their
    weighted error is the predicted divergence. ratios: for each (layer, side), measured over
    predicted divergence by n, or 1 without measurements."""

    energies: Float[np.ndarray, "L 2 chunks"]
    ratios: Mapping[tuple[int, Side], Mapping[int, float]]

    @property
    def chunks(self) -> int:
        return self.energies.shape[2]

    def expected(self, layer: int, side: Side, widths: Sequence[int]) -> float:
        """Return the divergence that the energies predict for these widths."""
        return expected_error(self.energies[layer, SIDES.index(side)], widths)

    def best(self, layer: int, side: Side, n: int) -> Widths:
        """Return the best widths with n bits in total."""
        return tuple(map(int, allocate(self.energies[layer, SIDES.index(side)], n)))

    def cost(self, layer: int, side: Side, widths: Sequence[int]) -> float:
        """Return the predicted KL if this side of this layer has these widths and everything else
        is exact."""
        return self.expected(layer, side, widths) * self.ratio(layer, side, sum(widths))

    def ratio(self, layer: int, side: Side, n: int) -> float:
        known = sorted(self.ratios.get((layer, side), {}).items())
        if not known:
            return 1.0
        counts, ratios = zip(*known, strict=True)
        return float(np.exp(np.interp(n, counts, np.log(ratios))))

    def shrunk(self) -> Costs:
        """Return costs to choose widths by: those of other windows, as far as these tell."""
        alike = dict[tuple[Side, int], list[float]]()
        for (_, side), ratios in self.ratios.items():
            for n, ratio in ratios.items():
                alike.setdefault((side, n), []).append(math.log(ratio))
        means = {key: sum(logs) / len(logs) for key, logs in alike.items()}
        shrunk = {
            (layer, side): {
                n: math.exp(KEPT * math.log(ratio) + (1 - KEPT) * means[side, n])
                for n, ratio in ratios.items()
            }
            for (layer, side), ratios in self.ratios.items()
        }
        return dataclasses.replace(self, ratios=shrunk)

    def total(self, widths: Sequence[Sequence[Widths]]) -> float:
        """Return the predicted KL of a whole cache: the sum over layers and sides."""
        return sum(
            self.cost(layer, side, widths)
            for layer, both in enumerate(widths)
            for side, widths in zip(SIDES, both, strict=True)
        )


def mean(costs: Sequence[Costs]) -> Costs:
    """Return the geometric mean of costs that were measured on several texts at the same bits."""
    first = costs[0]
    ratios = {
        side: {
            n: math.exp(sum(math.log(one.ratios[side][n]) for one in costs) / len(costs))
            for n in of_side
        }
        for side, of_side in first.ratios.items()
    }
    return dataclasses.replace(first, ratios=ratios)


def costs_of(
    calibration: Calibration, ratios: Mapping[tuple[int, Side], Mapping[int, float]]
) -> Costs:
    """Return the costs of a model from waterfill's calibration and the measured ratios.

    Values in a rotation have no energies: their costs hold only if they were measured.
    """
    chunks, layers = template_chunks(calibration.dims.head_dim), calibration.dims.num_hidden_layers
    energies = np.empty((layers, 2, chunks))
    for layer, (index, side) in itertools.product(range(layers), enumerate(SIDES)):
        energies_of_side = calibration.parameters(layer, side).get("energies")
        if energies_of_side is None:  # channels of a rotation are alike: only ratios count
            energies[layer, index] = 1.0
            continue
        channels = calibration.dims.head_dim // energies_of_side.shape[-1]  # 2 of a RoPE pair
        of_chunks = chunk_energies(energies_of_side, chunks)
        # the calibration has gradients of the mean, the divergence needs the sum's
        energies[layer, index] = of_chunks * channels / 2 * calibration.origin.length**2
    return Costs(energies, ratios)


def shared_out(
    costs: Costs, budget: int, stored: Sequence[int] | None = None
) -> list[tuple[Widths, Widths]]:
    """Return the widths (keys, values) of each layer, with at most `budget` bits in all chunks
    together and at most PROFILES different pairs.

    stored: the tokens that each layer keeps, in any unit. A bit of a layer's rows counts as often.
        Default: 1 in each layer.

    Raises ValueError if the budget is below one bit for each layer and side.
    """
    layers, sides = len(costs.energies), len(costs.energies) * len(SIDES)
    tokens = np.array([1] * layers if stored is None else stored)
    if budget < len(SIDES) * tokens.sum():
        raise ValueError(
            f"{budget} bits for a chunk of every layer and side are fewer than one for each of"
            f" {sides}"
        )
    counts = range(1, MAX_BITS * costs.chunks + 1)
    table = np.array(
        [
            [[costs.cost(l, s, costs.best(l, s, n)) for n in counts] for s in SIDES]
            for l in range(layers)
        ]
    )
    table = np.minimum.accumulate(table, axis=2)
    of_counts = np.outer(np.repeat(tokens, len(SIDES)), counts)
    chosen = _within(budget, table.reshape(sides, -1), of_counts).reshape(layers, 2)
    pairs = [
        (costs.best(layer, "k", counts[k]), costs.best(layer, "v", counts[v]))
        for layer, (k, v) in enumerate(chosen)
    ]
    one = (1, *[0] * (costs.chunks - 1))
    # the last fits every allowed budget
    candidates = [*dict.fromkeys(pair for pair in pairs if pair != (one, one)), (one, one)]
    priced = np.array(
        [
            [
                sum(costs.cost(l, s, w) for s, w in zip(SIDES, pair, strict=True))
                for pair in candidates
            ]
            for l in range(layers)
        ]
    )
    sizes = np.outer(tokens, [sum(map(sum, pair)) for pair in candidates])
    best, answer = np.inf, None
    for price, first in itertools.product(
        _prices(priced, sizes, budget), ((), (len(candidates) - 1,))
    ):
        chosen = _fewest(priced + price * sizes, first)
        taken = _within(budget, priced[:, chosen], sizes[:, chosen])
        total = priced[np.arange(layers), chosen[taken]].sum()
        if total < best and sizes[np.arange(layers), chosen[taken]].sum() <= budget:
            best, answer = total, chosen[taken]
    assert answer is not None, "the narrowest pair fits every budget that is allowed"
    return [candidates[index] for index in answer]


def _within(
    budget: int, costs: Float[np.ndarray, "items choices"], sizes: np.ndarray
) -> np.ndarray:
    """Return a choice for each item: the cheapest at the lowest price per bit at which all fit the
    budget. Remaining bits go where they help most."""
    items = np.arange(len(costs))
    price = _price(costs, sizes, budget, float(costs.max() - costs.min()) + 1.0)
    chosen = (costs + price * sizes).argmin(axis=1)
    while True:
        room = budget - sizes[items, chosen].sum()
        more, gain = sizes - sizes[items, chosen][:, None], costs[items, chosen][:, None] - costs
        worth = np.where((more > 0) & (more <= room) & (gain > 0), gain / np.maximum(more, 1), 0)
        item, choice = np.unravel_index(worth.argmax(), worth.shape)
        if not worth[item, choice]:
            return chosen
        chosen[item] = choice


def _prices(costs: np.ndarray, sizes: np.ndarray, budget: int) -> list[float]:
    """Return prices per bit around the one at which the cheapest candidates of all layers use up
    the budget."""
    price = _price(costs, sizes, budget, float(costs.max()) + 1.0)
    return [price * factor for factor in (0.5, 0.7, 1.0, 1.4, 2.0)]


def _price(costs: np.ndarray, sizes: np.ndarray, budget: int, high: float) -> float:
    """Return the lowest price per bit, below `high`, at which the cheapest choices of all items fit
    the budget."""
    low, items = 0.0, np.arange(len(costs))
    for _ in range(HALVINGS):
        price = (low + high) / 2
        cheapest = (costs + price * sizes).argmin(axis=1)
        over = sizes[items, cheapest].sum() > budget
        low, high = (price, high) if over else (low, price)
    return high


def _fewest(costs: np.ndarray, first: Sequence[int]) -> np.ndarray:
    """Return at most PROFILES candidates, the given ones first, chosen greedily to minimize the
    sum of each layer's cheapest."""
    chosen = list(first)
    while len(chosen) < min(PROFILES, costs.shape[1]):
        so_far = costs[:, chosen].min(axis=1, initial=np.inf)
        best = int(np.minimum(costs, so_far[:, None]).sum(axis=0).argmin())
        if best in chosen:
            break
        chosen.append(best)
    return np.array(chosen)
