"""The timing loop: what it times, and on what contents."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.gpu.device_timing import Timing, timing_loop


def test_each_call_reads_the_result_of_the_one_before():
    def call(x: jax.Array, copy: jax.Array) -> jax.Array:
        return x * copy

    last, out = jax.jit(timing_loop(call, lambda x, out: out + 1, 3))(
        jnp.float32(1), [jnp.float32(2), jnp.float32(3)]
    )
    expected = 1.0
    for _ in range(3):
        expected = (expected * 2 + 1) * 3 + 1
    assert float(last) == expected
    assert float(out) == expected * 3


def test_arrays_reach_each_call_in_the_order_that_they_are_stored_in():
    copies = [{"a": jnp.zeros((2, 3, 4)), "b": jnp.zeros(())}] * 2
    lowered = (
        jax.jit(timing_loop(lambda x, copy: x + copy["a"].sum(), lambda x, out: out, 3))
        .lower(jnp.float32(0), copies)
        .as_text()
    )
    assert lowered.count("@LayoutConstraint") == 2 * 3, (
        "both arrays, of two copies in the loop and of one behind it"
    )


def test_enough_copies_are_rotated_to_leave_the_cache():
    timing = Timing()
    assert timing.copies(30_000_000) == 4
    assert timing.is_cold(30_000_000)
    assert timing.copies(1 << 30) == 1
    assert timing.is_cold(1 << 30)
    assert timing.copies(1000) == timing.max_copies
    assert not timing.is_cold(1000)
