"""`--mesh` of commands that run a model: the devices that share its weights and its caches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import kvq_jax as kvq
from kvq_jax.placement.allowed import choose, parse
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli.console import input_errors

AUTO = "auto"


def add(parser: argparse.ArgumentParser) -> None:
    """Add --mesh, which `placement_of` reads."""
    parser.add_argument(
        "--mesh",
        metavar="WAYS",
        help=(
            "split the model and its cache among devices: rows=R,heads=H,tokens=T, each once or not"
            " at all, or auto (all devices: heads as far as the cache allows, tokens for the rest);"
            " default: one device. To try it on a CPU, set"
            " XLA_FLAGS=--xla_force_host_platform_device_count=8. docs/scale.md"
        ),
    )


def placement_of(
    text: str | None,
    specs: Sequence[kvq.CacheSpec],
    config: LlamaConfig,
    batch: int,
    capacity: int,
    dtype: str,
) -> kvq.Placement | None:
    """Return the placement that --mesh asks for, of caches that all can have it; None for a single
    device.

    UserError where the text cannot be read, asks for more devices than there are, or one of the
    caches cannot be split so.
    """
    if text is None:
        return None
    with input_errors():
        if text == AUTO:
            placement = choose(
                [
                    plan
                    for spec in specs
                    for plan in kvq.layout(spec, config, batch, capacity, dtype).plans
                ]
            )
        else:
            placement = parse(text)
        if placement.devices == 1:
            return None
        for spec in specs:
            kvq.layout(spec, config, batch, capacity, dtype, placement)
        return placement
