"""Serving engines for commands: the options that set their size, and an engine with a loaded
model."""

from __future__ import annotations

import argparse

import kvq_jax as kvq
from kvq_models.inference.engine.engine import WIDTHS, Engine
from kvq_models.inference.engine.engine_size import EngineSize, engine_size
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import device_memory, inputs
from kvq_tools.cli.console import bar, input_errors
from kvq_tools.cli.model_loading import load_model


def size_of(
    options: argparse.Namespace, config: LlamaConfig, capacity: int | None = None
) -> EngineSize:
    """Return the size of the engine's caches. capacity: tokens per slot if --capacity is not given.
    Raises UserError if the size does not fit --memory or the device."""
    with input_errors():
        size = engine_size(
            options.cache.spec,
            config,
            memory=options.memory,
            slots=options.slots,
            capacity=options.capacity or capacity,
            dtype=inputs.rows_dtype(options),
        )
    device_memory.check_memory(
        kvq.cache.layout(
            options.cache.spec, config, size.slots + 1, size.capacity, inputs.rows_dtype(options)
        )
    )
    return size


def loaded(
    options: argparse.Namespace,
    size: EngineSize,
    queue_limit: int,
    *,
    longest: int | None = None,
    prefixes: PrefixStore | None = None,
    placement: kvq.Placement | None = None,
    verify: bool = False,
) -> Engine:
    """Return an engine with the model loaded. Its programs are not compiled yet.

    Args:
        queue_limit: requests that may wait.
        longest: tokens of the longest prompt to come. Programs for longer prompts are left out,
            which does not change results.
        prefixes: a store of prompts that were already read.
        placement: the mesh that holds model and slots.
        verify: look for damaged memory.
    """
    widths = [
        width
        for width, below in zip(WIDTHS, (0, *WIDTHS), strict=False)
        if longest is None or longest > below
    ]
    llama = load_model(options, placement)
    with input_errors():
        llama = prepare(llama, options.cache.spec, options.calibration, progress=bar)
        return Engine(
            llama,
            options.cache.spec,
            slots=size.slots,
            capacity=size.capacity,
            dtype=inputs.rows_dtype(options),
            queue_limit=queue_limit,
            widths=widths,
            implementation=options.implementation,
            prefixes=prefixes,
            placement=placement,
            verify=verify,
        )
