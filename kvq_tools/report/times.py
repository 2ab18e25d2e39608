"""Time decode steps through caches, at several contexts, on JAX's first device.

A cache starts zeroed, and full except for the steps to come: its content does not change the time
of reading it, and no prompt of that length has to be computed. Caches take turns, one step each, so
that other load on the machine hits all of them alike.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.progress import Progress, silent
from kvq_models.inference.decoding import decode_step, implementations
from kvq_models.llama.model import Llama
from kvq_tools.processor import processor_name
from kvq_tools.report.schema import Speed, StepTimes, TimingMachine

DIGITS = 4  # decimal places of milliseconds


class PreparedCache(NamedTuple):
    """A cache with its name, and the model prepared for it."""

    name: str
    spec: CacheSpec
    llama: Llama


def decode_times(
    candidates: Sequence[PreparedCache],
    contexts: Sequence[int],
    steps: int,
    progress: Progress | None = None,
) -> Speed | None:
    """Time `steps` decode steps of one sequence through each cache at each context that `progress`
    lets finish. None if that is none. Compiling and a first step are not timed.

    Raises ValueError if a context has no room for the steps.
    """
    short = [context for context in contexts if context <= steps]
    if short:
        raise ValueError(f"a context of {short[0]} tokens has no room for {steps + 1} steps")
    load = [_load()]
    samples: list[list[tuple[float, ...]]] = [[] for _ in candidates]
    reads: list[str] = []
    for context in (progress or silent)(contexts, "timing decode steps at contexts"):
        steppers = [_Stepper(candidate, context, steps) for candidate in candidates]
        rounds = [[stepper.timed() for stepper in steppers] for _ in range(steps)]
        for times_ms, taken in zip(samples, zip(*rounds, strict=True), strict=True):
            times_ms.append(taken)
        reads = [stepper.reads for stepper in steppers]
    if not reads:
        return None
    machine = TimingMachine(device_name(), os.cpu_count() or 0, jax.__version__, (*load, _load()))
    times = (
        StepTimes(c.name, str(c.spec), read, tuple(times_ms))
        for c, read, times_ms in zip(candidates, reads, samples, strict=True)
    )
    return Speed(tuple(contexts[: len(samples[0])]), machine, tuple(times))


class _Stepper:
    """One cache with room for a first step and `steps` timed ones. `timed()` takes one step and
    returns its milliseconds."""

    def __init__(self, candidate: PreparedCache, context: int, steps: int):
        self._llama = candidate.llama
        empty = kvq.init_cache(
            candidate.spec, self._llama.config, 1, context, self._llama.embed[...].dtype
        )
        self._cache = dataclasses.replace(
            empty, lengths=jnp.full_like(empty.lengths, context - steps - 1)
        )
        self._token = jnp.zeros(1, jnp.int32)
        self.reads = "/".join(sorted(set(implementations(empty))))
        self._program = (
            jax.jit(decode_step, donate_argnames="cache")
            .lower(self._llama, self._cache, self._token)
            .compile()
        )
        self.timed()

    def timed(self) -> float:
        started = time.perf_counter()
        logits, self._cache = jax.block_until_ready(
            self._program(self._llama, self._cache, self._token)
        )
        return round(1e3 * (time.perf_counter() - started), DIGITS)


def device_name() -> str:
    """Return the name of JAX's first device, with the processor's name if that is only "cpu"."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    name = processor_name()
    return f"CPU, {name}" if name else "CPU"


def _load() -> float:
    """Return the one-minute load average, or 0 if the system does not provide it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0
