"""Keep waiting caches in the host's memory, so that devices have room for others: a chat that
waits, a request that was put back.

    cache = park(cache)        # bodies in pinned host memory, and their bytes on devices free
    cache = unpark(cache)      # bodies on the devices again, bit for bit

Windows, statistics and lengths stay on the devices. Each device's part lies in the memory of its
own host, so nothing crosses a mesh. A parked cache takes no step: attention that reads blocks
across the bus would be as slow as the bus.
"""

from __future__ import annotations

import dataclasses

import jax

from kvq_jax.cache.cache import Cache, check_held

HOST, DEVICE = "pinned_host", "device"  # memory kinds, as JAX names them


def park(cache: Cache) -> Cache:
    """Return the cache with its bodies in pinned host memory, bit for bit. The bodies of `cache`
    are consumed, one array after the other.

    Args:
        cache: a cache on devices that have pinned host memory.

    Raises:
        ValueError: in one line, if the cache was consumed, is parked already, or a device has no
            pinned host memory.
    """
    check_held(cache)
    devices = {
        device
        for array in jax.tree.leaves(cache.layers)
        for device in array.sharding.addressable_devices
    }
    kinds = sorted({memory.kind for device in devices for memory in device.addressable_memories()})
    if HOST not in kinds:
        raise ValueError(
            f"these devices have no memory of kind {HOST!r}, only {', '.join(map(repr, kinds))}:"
            " save_cache writes a file"
        )
    return _moved(cache, HOST)


def unpark(cache: Cache) -> Cache:
    """Return a parked cache with its bodies on the devices again, bit for bit.

    Args:
        cache: the result of `park`.

    Raises:
        ValueError: in one line, if the cache is not parked, or was consumed.
    """
    check_held(cache, parked=True)
    return _moved(cache, DEVICE)


def _moved(cache: Cache, kind: str) -> Cache:
    def move(array: jax.Array) -> jax.Array:
        moved = jax.device_put(array, array.sharding.with_memory_kind(kind)).block_until_ready()
        array.delete()  # JAX donates nothing across memories
        return moved

    layers = tuple(
        dataclasses.replace(layer, body=jax.tree.map(move, layer.body)) for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers)
