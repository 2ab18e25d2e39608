"""Waterfill's widths for a budget of stored bits, from the costs of sides or from a calibration
alone.

A layer with a sliding window keeps few tokens of a long sequence. A bit of its rows costs few
bytes, so the budget is counted in the tokens that each layer keeps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import kvq_jax as kvq
from kvq_jax.cache.accounting import max_blocks
from kvq_jax.cache.spec import CacheSpec
from kvq_jax.methods.base import per_layer
from kvq_jax.methods.waterfill import Waterfill
from kvq_jax.methods.waterfill.widths import written
from kvq_jax.types.array_types import ModelDims
from kvq_models.calibration.file import Calibration, resolved
from kvq_tools.planning.allocation import Costs, Widths, costs_of, shared_out
from kvq_tools.planning.defaults import METHOD, Bases


def stored_tokens(
    config: ModelDims, context: int, spec: CacheSpec | str = METHOD
) -> tuple[int, ...]:
    """Return the body tokens that each layer of a cache keeps of a sequence of `context` tokens, as
    the smallest whole numbers with their ratios: 1 in every layer without windows."""
    blocks = [max_blocks(plan) for plan in kvq.cache.layout(spec, config, 1, context).plans]
    common = math.gcd(*blocks)
    return tuple(number // common for number in blocks)


def widths_within(
    costs: Costs, bits: float, config: ModelDims, context: int, spec: CacheSpec | str = METHOD
) -> list[tuple[Widths, Widths]]:
    """Return the widths (keys, values) of each layer for `bits` stored bits an element, in no more
    bytes than if every layer of the cache had the template's. Raises ValueError if they are too few
    for codes."""
    stored = stored_tokens(config, context, spec)
    of_layer = math.floor(2 * costs.chunks * (bits - 8 / config.head_dim) + 1e-6)
    if of_layer < 2:
        minimum = 1 / costs.chunks + 8 / config.head_dim
        raise ValueError(
            f"{bits:g} bits cannot be stored with heads of {config.head_dim} channels:"
            f" {minimum:g} is the least"
        )
    return shared_out(costs, of_layer * sum(stored), stored=stored)


def spec_of(widths: Sequence[Sequence[Widths]], spec: CacheSpec | None = None) -> CacheSpec:
    """Return the spec of waterfill with these widths (keys, values) for each layer, and the windows
    and other options of `spec`, by default waterfill's. Widths replace its bits."""
    spec = spec or kvq.parse(METHOD)
    keys, values = (per_layer([written(both[side]) for both in widths]) for side in (0, 1))
    bits = Waterfill().bits  # the default, which a spec's text leaves out
    method = dataclasses.replace(
        cast("Waterfill", spec.k), bits=bits, k_widths=keys, v_widths=values
    )
    return dataclasses.replace(spec, k=method, v=method)


def planned(
    spec: CacheSpec, calibration: Calibration, config: ModelDims, context: int
) -> CacheSpec:
    """Return waterfill with the widths that its calibration gives, in sequences of `context`
    tokens. If all layers keep as many, each shares out the same number of bits; so does each if
    values have no energies, which say what a bit of them is worth."""
    if len(set(stored_tokens(config, context, spec))) == 1 or not Bases.of(spec.k).predicted:
        return resolved(spec, calibration)
    bits = cast("Waterfill", spec.k).bits
    widths = widths_within(costs_of(calibration, {}), bits, config, context, spec)
    return spec_of(widths, spec)
