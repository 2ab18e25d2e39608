"""The option --mesh: the devices that share a model's weights and caches."""

from __future__ import annotations

from collections.abc import Sequence

import kvq_jax as kvq
from kvq_jax.placement.allowed import choose, parse
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli.console import input_errors

AUTO = "auto"


def placement_of(
    text: str | None,
    specs: Sequence[kvq.cache.CacheSpec],
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: str,
) -> kvq.Placement | None:
    """Return the placement that --mesh asks for, or None for a single device.

    Raises UserError if the text cannot be parsed, if it needs more devices than there are, or if
    one of the caches cannot be split that way.
    """
    if text is None:
        return None
    with input_errors():
        if text == AUTO:
            placement = choose(
                [
                    plan
                    for spec in specs
                    for plan in kvq.cache.layout(spec, config, batch, capacity, dtype).plans
                ]
            )
        else:
            placement = parse(text)
        if placement.devices == 1:
            return None
        for spec in specs:
            kvq.cache.layout(spec, config, batch, capacity, dtype, placement)
        return placement
