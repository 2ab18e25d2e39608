"""Time alternatives in turns, and spread the decode steps that quantize a block over all steps.

Alternatives run once each, round after round: what else the machine does then hits all of them
alike. A ratio is formed within a round, before anything is averaged.

A cache quantizes in one decode step of `block`. That step takes up to several times as long as the
others, and a median over all of them would drop it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

import kvq_jax as kvq
from kvq_jax.layer.regions import Regions

Clock = Callable[[], float]


def in_turns(
    works: Sequence[Callable[[], object]],
    rounds: int,
    clocks: Sequence[Clock] = (time.perf_counter,),
) -> np.ndarray:
    """Return the milliseconds [clocks, works, rounds] of calls that are waited for. Each work runs
    once before that, untimed."""
    for work in works:
        jax.block_until_ready(work())
    times = np.empty((rounds, len(works), len(clocks)))
    for of_round in times:
        for sample, work in zip(of_round, works, strict=True):
            began = [clock() for clock in clocks]
            jax.block_until_ready(work())
            sample[:] = [clock() for clock in clocks]
            sample -= began
    return 1e3 * np.moveaxis(times, 0, 2).swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class Cycle:
    """The decode steps of one cache, of which every `block`-th quantizes a block of tokens.

    ageing: the indices of those that do, among the timed steps.
    """

    block: int = 1
    ageing: tuple[int, ...] = ()

    @property
    def left_out(self) -> bool:
        """Return True if the cache quantizes blocks, but in none of the timed steps."""
        return self.block > 1 and not self.ageing

    def step(self, samples: Sequence[float]) -> float:
        """Return the samples' value for a step, its share of quantizing included:

            (1 - 1/block) median(steps that quantize nothing) + 1/block median(steps that quantize)

        It is the mean over a whole block, with medians in place of the two kinds' own means: one
        interrupted step moves neither. If no timed step quantizes, it is the median of all."""
        values = np.asarray(samples)
        ages = np.isin(np.arange(len(values)), self.ageing)
        if not ages.any():
            return float(np.median(values))
        share = 1 / self.block
        return float((1 - share) * np.median(values[~ages]) + share * np.median(values[ages]))

    def ratio(self, samples: Sequence[float], base: Sequence[float]) -> float:
        """Return `step` of the ratios to another's samples of the same rounds."""
        return self.step((np.asarray(samples) / np.asarray(base)).tolist())


def cycle(spec: str, length: int, steps: int) -> Cycle:
    """Return the cycle of `steps` decode steps through a cache that holds `length` tokens."""
    cache = kvq.parse(spec)
    if cache.block == 1:  # every step does the same
        return Cycle()
    regions = Regions(cache.sink, cache.recent, cache.block, length + steps)
    aged = [regions.aged_tokens(length + i) for i in range(steps + 1)]
    return Cycle(cache.block, tuple(i for i in range(steps) if aged[i + 1] > aged[i]))


def check_rounds(caches: Iterable[str], lengths: Iterable[int], rounds: int) -> None:
    """Raise ValueError unless every cache quantizes a block in exactly one of `block` timed steps
    that begin with any of these lengths."""
    blocks = {spec: kvq.parse(spec).block for spec in caches}
    whole = math.lcm(*blocks.values())
    if rounds < 1 or rounds % whole:
        raise ValueError(
            f"--rounds {rounds} must be a multiple of {whole}: a step of {whole} quantizes a block,"
            " and its time counts"
        )
    for length in lengths:
        for spec, block in blocks.items():
            if block > 1 and len(cycle(spec, length, rounds).ageing) * block != rounds:
                raise ValueError(f"--tokens: {spec} does not quantize after {length} tokens yet")
