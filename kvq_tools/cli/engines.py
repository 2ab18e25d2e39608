"""Engines of the command line: the options that decide their size, and one with a loaded model."""

from __future__ import annotations

import argparse

import kvq_jax as kvq
from kvq_models.inference.engine.budget import MOST_SLOTS, SLOTS, Budget, plan
from kvq_models.inference.engine.engine import WIDTHS, Engine
from kvq_models.inference.engine.prefixes import PrefixStore
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs
from kvq_tools.cli.console import bar, input_errors, progress


def add_size(parser: argparse.ArgumentParser, *, capacity: bool = True) -> None:
    """Add what decides the size of an engine, which `size_of` reads."""
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        type=inputs.byte_size,
        help=(
            f"what the caches may take, such as 8GiB: as many slots as fit, at most {MOST_SLOTS}"
            " (weights not counted)"
        ),
    )
    parser.add_argument(
        "--slots",
        metavar="B",
        type=inputs.positive,
        help=f"requests at a time (default: {SLOTS}, or what fits --memory)",
    )
    if capacity:
        parser.add_argument(
            "--capacity",
            metavar="S",
            type=inputs.positive,
            help="tokens of a slot (default: the model's positions)",
        )


def size_of(
    options: argparse.Namespace, config: LlamaConfig, capacity: int | None = None
) -> Budget:
    """Return the size of the engine's caches. capacity: where --capacity is not given. UserError
    where it does not fit --memory, or the device."""
    with input_errors():
        size = plan(
            options.cache,
            config,
            memory=options.memory,
            slots=options.slots,
            capacity=options.capacity or capacity,
            dtype=inputs.rows_dtype(options),
        )
    inputs.check_memory(
        kvq.layout(options.cache, config, size.slots + 1, size.capacity, inputs.rows_dtype(options))
    )
    return size


def loaded(
    options: argparse.Namespace,
    size: Budget,
    queue_limit: int,
    *,
    longest: int | None = None,
    wait: bool = True,
    prefixes: PrefixStore | None = None,
    placement: kvq.Placement | None = None,
) -> Engine:
    """Return an engine with the model loaded and its programs compiled, those of longer chunks only
    with `wait`. longest: tokens of the longest prompt that will come; programs for longer ones are
    left out, which changes none of its results. prefixes: where
    prompts that were read are kept. placement: the mesh that model and slots lie on."""
    widths = [
        width
        for width, below in zip(WIDTHS, (0, *WIDTHS), strict=False)
        if longest is None or longest > below
    ]
    with progress(f"loading {options.model}"), input_errors():
        llama, _ = load_llama(options.model, dtype=inputs.model_dtype(options), mesh=placement)
    with input_errors():
        llama = prepare(llama, options.cache, options.calibration, progress=bar)
        engine = Engine(
            llama,
            options.cache,
            slots=size.slots,
            capacity=size.capacity,
            dtype=inputs.rows_dtype(options),
            queue_limit=queue_limit,
            widths=widths,
            implementation=options.implementation,
            prefixes=prefixes,
            placement=placement,
        )
    with progress("compiling"):
        engine.warm_up(wait=wait)
    return engine
