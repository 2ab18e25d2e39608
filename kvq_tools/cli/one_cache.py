"""The one cache of `kvq generate` and `kvq chat`: empty at first, or from a file of `kvq
prefill`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import kvq_jax as kvq
from kvq_jax.cache.cache import Cache
from kvq_models.inference.method_parameters import prepare
from kvq_models.llama.config import LlamaConfig
from kvq_models.llama.model import Llama
from kvq_models.llama.packed_loading import fingerprint
from kvq_tools.cli import device_memory, handover, inputs, mesh
from kvq_tools.cli.console import UserError, bar, input_errors
from kvq_tools.cli.handover import SavedPrompt
from kvq_tools.cli.model_loading import load_model
from kvq_tools.cli.planned import named


def chosen(options: argparse.Namespace) -> tuple[LlamaConfig, SavedPrompt | None]:
    """Complete options.cache. Return the configuration, and the file of --from if there is one."""
    if options.saved is None:
        saved, options.cache = None, options.cache or inputs.DENSE
        config = inputs.read_config(options.model, options.cache)
    else:
        config = inputs.read_config(options.model, *([options.cache] if options.cache else []))
        saved = handover.described(options.saved, config)
        stored = named(saved.layout.spec)
        options.cache = options.cache or stored
        if options.cache.spec != stored.spec:
            raise UserError(
                f"{options.saved!r} holds the cache {stored.text!r}, but --cache is"
                f" {options.cache.text!r}"
            )
    inputs.check_calibration_option(options, config)
    return config, saved


def checked_placement(
    options: argparse.Namespace, config: LlamaConfig, capacity: int, saved: SavedPrompt | None
) -> kvq.Placement | None:
    """Return the placement that --mesh asks for. Raises UserError if the cache does not fit the
    devices, or cannot be read as --implementation asks."""
    spec, rows = options.cache.spec, inputs.rows_dtype(options)
    placement = mesh.placement_of(options.mesh, [spec], config, 1, capacity, rows)
    layout = saved.layout if saved else kvq.cache.layout(spec, config, 1, capacity, rows, placement)
    device_memory.check_readable(layout, options.implementation)
    return placement


def loaded(
    options: argparse.Namespace,
    capacity: int,
    placement: kvq.Placement | None,
    saved: SavedPrompt | None,
) -> tuple[Llama, Callable[[], Cache]]:
    """Return the model with the parameters that the cache needs, and a function that makes the
    cache."""
    llama, spec = load_model(options, placement), options.cache.spec
    model_fingerprint = "" if saved is None else fingerprint(llama)
    with input_errors():
        llama = prepare(llama, spec, options.calibration, progress=bar)
    if saved is not None:
        return llama, functools.partial(handover.load, saved, llama, model_fingerprint)
    size = llama.config, capacity, inputs.rows_dtype(options), placement
    return llama, functools.partial(device_memory.new_cache, spec, *size)
