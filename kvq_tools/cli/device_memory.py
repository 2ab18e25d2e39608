"""The memory of the device: whether a cache fits, and an empty cache in it."""

from __future__ import annotations

import os

import jax

import kvq_jax as kvq
from kvq_jax.attention.dispatch import Implementation
from kvq_models.inference import decoding
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli.console import UserError, format_bytes, input_errors


def check_memory(cache: kvq.cache.Cache) -> None:
    """Raise UserError if a device's share of this layout exceeds its memory. Weights and working
    memory are not counted."""
    placement, memory = cache.placement, device_memory()
    size = kvq.size.nbytes(cache) if placement is None else placement.shard_nbytes(cache.axes)
    if memory is not None and size > memory:
        raise UserError(
            f"a cache of {cache.capacity} tokens takes {format_bytes(size)}, and this device has"
            f" {format_bytes(memory)}"
        )


def check_readable(cache: kvq.cache.Cache, implementation: Implementation) -> None:
    """Raise UserError if a cache of this layout does not fit the device, or if this implementation
    cannot read it here."""
    check_memory(cache)
    with input_errors():
        decoding.implementations(cache, implementation)


def new_cache(
    spec: kvq.cache.CacheSpec,
    config: LlamaConfig,
    capacity: int,
    dtype: str,
    placement: kvq.Placement | None = None,
) -> kvq.cache.Cache:
    """Return an empty cache of one row. Raises UserError if the device has no room for it."""
    try:
        return kvq.init_cache(spec, config, 1, capacity, dtype, placement)
    except jax.errors.JaxRuntimeError as error:
        size = format_bytes(kvq.size.nbytes(kvq.cache.layout(spec, config, 1, capacity, dtype)))
        raise UserError(
            f"no room for a cache of {capacity} tokens, which takes {size}, beside the model:"
            f" {error}"
        ) from error


def device_memory() -> int | None:
    """Return the bytes of the memory that holds arrays, or None if unknown."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None  # not a POSIX system
