"""Time a function on a device: many calls in one compiled loop, on contents outside the GPU's
cache.

    x <- feed(x, call(x, copy))      for every copy in turn, `steps` times over

A sample is the host's clock around the loop, divided by the number of calls. So Python and the wait
for the device are spread over all calls. But a call is several launches, and if the device finishes
before the next launch comes, the time is the launches'.

Each call has an input that depends on the result of the call before, so XLA cannot hoist, join or
drop calls, or the rearrangement of an array that a call reads. Copies have equal shapes and
different contents. Together they exceed the L2 cache if memory allows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

TINY = 1e-30  # times a result, added to an input: a dependency that changes no digit


@dataclasses.dataclass(frozen=True)
class Timing:
    """A measurement's length. seconds: of a sample, about, at `expected_rate` bytes a second.
    cache_bytes: of the L2 (60 MB on an H200)."""

    samples: int = 7
    seconds: float = 0.012
    max_calls: int = 2000
    max_copies: int = 64
    cache_bytes: int = 60_000_000
    expected_rate: float = 3e12
    copy_bytes: int = 4 << 30  # of the array whose copying is the yardstick

    def copies(self, size: int) -> int:
        """Return the number of copies of `size` bytes that fill twice the L2, as far as a program
        can hold them."""
        return max(1, min(self.max_copies, math.ceil(2 * self.cache_bytes / size)))

    def is_cold(self, size: int) -> bool:
        """Return True if the copies exceed the L2 twofold."""
        return self.copies(size) * size >= 2 * self.cache_bytes

    def steps(self, moved: int, copies: int) -> int:
        calls = self.seconds / (moved / self.expected_rate + 8e-6)
        return max(1, round(min(calls, self.max_calls) / copies))


SHORT = Timing(
    samples=3, seconds=0.002, max_calls=20, max_copies=2, copy_bytes=1 << 28
)  # to see that it works


@functools.cache
def memory_limit() -> float:
    """Return the bytes that this process may use of its device's memory, or no limit if the device
    does not say."""
    return float((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf")))


def timing_loop(
    call: Callable[[Any, Any], Any], feed: Callable[[Any, Any], Any], steps: int
) -> Callable[[Any, Sequence[Any]], Any]:
    """Return the loop to compile, a function of x and the copies: steps * copies calls, then one
    more. It returns the last x and result."""

    def run(x: Any, copies: Sequence[Any]) -> Any:
        def step(_: Array, x: Any) -> Any:
            for copy in copies:
                # without the barriers a dequantization would move out of the loop, and the slice of
                # a result into what computes it
                out = call(*lax.optimization_barrier((x, as_stored(copy))))
                x = feed(*lax.optimization_barrier((x, out)))
            return x

        x = lax.fori_loop(0, steps, step, x)
        # without x, a loop whose calls do not read it would be dropped
        return x, call(*lax.optimization_barrier((x, as_stored(copies[-1]))))

    return run


def as_stored(copy: Any) -> Any:
    """Fix the order of the arrays' axes in memory: XLA would pass the barriers with another order
    that suits the call, and transpose each array once, before the loop."""
    return jax.tree.map(
        lambda a: with_layout_constraint(a, Layout(major_to_minor=tuple(range(a.ndim)))), copy
    )


def first(out: Any) -> Array:
    """Return TINY times one entry of a result, in fp32, as `feed` needs it."""
    leaf = jax.tree.leaves(out)[0]
    return TINY * lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(()).astype(
        jnp.float32
    )


def sampled_ms(run: Callable[[], Any], calls: int, samples: int) -> tuple[float, ...]:
    """Return the milliseconds of one call by the host's clock, from runs of `calls` calls each,
    after two runs to warm up."""
    for _ in range(2):
        jax.block_until_ready(run())
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(round(1e3 * (time.perf_counter() - start) / calls, 6))
    return tuple(times)


def scattered(shape: tuple[int, ...], seed: Array) -> Array:
    """Return uint32 numbers without a pattern, made in place: Murmur's finalizer of each index.
    They are the same on every device."""
    index = jnp.broadcast_to(seed.astype(jnp.uint32) * np.uint32(0x9E3779B9), shape)
    stride = 1
    for axis in reversed(range(len(shape))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        index = (index ^ (index >> np.uint32(shift))) * np.uint32(factor)
    return index ^ (index >> np.uint32(16))


def uniform(
    shape: tuple[int, ...], seed: Array, low: float, high: float, dtype: Any = jnp.float32
) -> Array:
    """Return numbers from low to high, uniformly distributed."""
    unit = (scattered(shape, seed) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
    return (unit * np.float32(high - low) + np.float32(low)).astype(dtype)


def random_words(shape: tuple[int, ...], seed: Array) -> Array:
    """Return int16 [*shape] of random bits."""
    return lax.bitcast_convert_type(
        (scattered(shape, seed) >> np.uint32(16)).astype(jnp.uint16), jnp.int16
    )


def bandwidth_samples(timing: Timing) -> dict[str, tuple[int, tuple[float, ...]]]:
    """Return (bytes moved, milliseconds) of "copy", x + 1 into another array, and "read", the sum
    of x, for int32 x in device memory."""
    x = lax.bitcast_convert_type(
        jax.jit(scattered, static_argnums=0)((timing.copy_bytes // 4,), jnp.uint32(7)), jnp.int32
    )
    size, calls = x.size * 4, 8

    def repeated(function: Callable[[Array], Array]) -> tuple[float, ...]:
        compiled = jax.jit(function).lower(x).compile()

        def run() -> Array:
            for _ in range(calls - 1):
                compiled(x)
            return compiled(x)

        return sampled_ms(run, calls, timing.samples)

    return {
        "copy": (2 * size, repeated(lambda x: x + 1)),
        "read": (size, repeated(functools.partial(jnp.sum, dtype=jnp.int32))),
    }
