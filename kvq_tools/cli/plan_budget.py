"""The budget of `kvq plan`: a speed in bytes, and bytes in bits of waterfill."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import math
from collections.abc import Sequence

import kvq_jax as kvq
from kvq_jax import peak_rates
from kvq_jax.cache.spec import CacheSpec
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.weight_count import weight_count
from kvq_tools.cli.console import UserError, format_bytes
from kvq_tools.cli.options.plan import Bits, Budget, Bytes
from kvq_tools.planning.defaults import Bases

WEIGHT_BYTES = 2  # bfloat16
MIN_BITS, MAX_BITS = 1, 8  # bits that a budget of bytes may buy


def budget(options: argparse.Namespace, config: LlamaConfig) -> Budget:
    """Return the budget: --budget, limited to the bytes that a step can read in batch / X seconds.
    One of the two is there.

    A step reads the whole cache and all weights once, except the unused rows of the embedding.
    Raises UserError or ValueError, in one line, if options are missing or if the weights alone take
    too long.
    """
    if (options.device is None) != (options.tokens_per_second is None):
        raise UserError("--device and --tokens-per-second belong together: give both or neither")
    if options.device is None:
        return options.budget
    if isinstance(options.budget, Bits):
        raise UserError(
            "a speed is a budget of bytes: give --budget in bytes as well, or leave it out"
        )
    if not options.tokens_per_second > 0:
        raise UserError("--tokens-per-second must be above 0")
    device = peak_rates.device(options.device)
    readable = device.bandwidth * options.batch / options.tokens_per_second
    if not math.isfinite(readable):
        raise UserError(
            f"--device {options.device} reads more than can be counted in a step of"
            f" --tokens-per-second {options.tokens_per_second:g}: give a higher speed"
        )
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = (weight_count(config) - unread) * WEIGHT_BYTES
    room = int(readable) - weights
    if room <= 0:
        raise ValueError(
            f"{options.tokens_per_second:g} tokens a second are out of reach: the weights"
            f" ({format_bytes(weights)}) alone take {weights / device.bandwidth * 1e3:.2f} ms of a"
            f" step on {device.name}, and {options.batch} sequences leave"
            f" {options.batch / options.tokens_per_second * 1e3:.2f}"
        )
    return Bytes(room if options.budget is None else min(room, options.budget.nbytes))


def budgets(
    budget: Budget,
    choices: Sequence[Bases],
    config: LlamaConfig,
    batch: int,
    context: int,
    dtype: str,
) -> dict[Bases, float]:
    """Return the bits of a budget for each choice of bases that fits it. Raises ValueError, in one
    line, if none does."""
    match budget:
        case Bits(bits):
            for bases in choices:  # refuses too few or too many bits before any measurement
                kvq.size.of(bases.spec(bits), config, batch, context, dtype)
            return dict.fromkeys(choices, bits)
        case Bytes(nbytes):
            fitting: dict[Bases, float] = {}
            refusals: list[ValueError] = []
            for bases in choices:
                try:
                    fitting[bases] = max_bits(nbytes, config, batch, context, dtype, bases)
                except ValueError as error:
                    refusals.append(error)
            if not fitting:
                raise refusals[0]
            return fitting


def fits(
    budget: Budget, spec: CacheSpec, config: LlamaConfig, batch: int, context: int, dtype: str
) -> bool:
    """Return True if a cache of any method keeps within the budget: of stored bits, or of resident
    bytes, whatever bits these pay for in another method."""
    match budget:
        case Bits(bits):
            return kvq.size.body_bits_per_element(spec, config, context) <= bits + 1e-6
        case Bytes(nbytes):
            return kvq.size.of(spec, config, batch, context, dtype).resident <= nbytes


def max_bits(
    nbytes: int,
    config: LlamaConfig,
    batch: int,
    context: int,
    dtype: str,
    bases: Bases,
    recent: int | None = None,
) -> float:
    """Return the most bits whose resident bytes fit, to 1/16, if the newest `recent` tokens are
    exact (None: as many as usual). Raises ValueError, in one line, if not even the fewest do."""
    window = "" if recent is None else f",recent={recent}"

    def size(sixteenths: int) -> int:
        spec = bases.spec(sixteenths / 16) + window
        return kvq.size.of(spec, config, batch, context, dtype).resident

    choices = range(16 * MIN_BITS, 16 * MAX_BITS + 1)
    fitting = bisect.bisect_right(choices, nbytes, key=size)
    if not fitting:
        raise ValueError(
            f"no cache fits {format_bytes(nbytes)}: {batch} x {context} tokens take"
            f" {format_bytes(size(choices[0]))} at the least"
        )
    return choices[fitting - 1] / 16


def bits_by_recent(
    nbytes: int,
    recents: Sequence[int],
    config: LlamaConfig,
    batch: int,
    context: int,
    dtype: str,
    bases: Bases,
) -> dict[int, float]:
    """Return the most bits within these resident bytes if the newest `recents` tokens are exact,
    for each number with which any cache fits."""
    bits = dict[int, float]()
    for recent in recents:
        with contextlib.suppress(ValueError):
            bits[recent] = max_bits(nbytes, config, batch, context, dtype, bases, recent)
    return bits
