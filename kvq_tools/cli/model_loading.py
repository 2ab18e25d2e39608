"""Load the model of a command. Commands that read no weights need neither this nor Flax."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import kvq_jax as kvq
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama import checkpoint
from kvq_models.llama.model import Llama
from kvq_tools.cli import inputs
from kvq_tools.cli.console import input_errors, loading


def prepared(
    llama: Llama, specs: Sequence[kvq.cache.CacheSpec], files: Sequence[str | None]
) -> list[tuple[Llama, kvq.cache.CacheSpec]]:
    """Return the model with the parameters of each cache, which its calibration file may hold, and
    the cache."""
    with input_errors():
        return [(prepare(llama, spec, file), spec) for spec, file in zip(specs, files, strict=True)]


def load_model(options: argparse.Namespace, placement: kvq.Placement | None = None) -> Llama:
    """Load MODEL as --dtype, --weights and --activations say, and show that it is loaded."""
    with loading(options.model), input_errors():
        return checkpoint.load_weights(
            checkpoint.open_checkpoint(options.model),
            dtype=inputs.model_dtype(options),
            mesh=placement,
            weights=options.weights,
            activations=options.activations,
        )
