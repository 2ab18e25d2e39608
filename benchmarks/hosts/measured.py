"""Compare the tokens of a host through its own cache and through kvq's, and time decode steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

import kvq_jax as kvq
from benchmarks.cpu.timing import relative_error
from benchmarks.hosts.host import STREAMS, Generated, Host, random_rows
from benchmarks.hosts.report import CACHES, HOSTS_OWN, Adapter, Comparison, Step
from benchmarks.turns import in_turns


def adapter(host: Host) -> Adapter:
    """Return the lines of code of an adapter, and what its caches change in the host's answers."""
    expected = host.generate(None)
    comparisons = tuple(compared(spec, host.generate(spec), expected) for spec in CACHES)
    return Adapter(host.name, host.version, host.adapter_lines, host.your_lines, comparisons)


def compared(spec: str, generated: Generated, expected: Generated) -> Comparison:
    """Return the tokens before the first that differs, of all rows, and the largest relative error
    of the logits from which these tokens and the first that differs were drawn."""
    (tokens, logits), (wanted, wanted_logits) = generated, expected
    alike = np.cumprod(tokens == wanted, axis=1).astype(bool)
    comparable = np.pad(alike[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    error = relative_error(logits[comparable], wanted_logits[comparable])
    return Comparison(spec, error, int(alike.sum()), tokens.size)


def steps(host: Host, capacity: int, rounds: int) -> list[Step]:
    """Return the times of decode steps at the end of caches of `capacity` tokens, which the caches
    take in turns. Each holds the same random keys and values. The last step fills them."""
    caches = (HOSTS_OWN, *CACHES)
    tokens = capacity - rounds - 2  # a step to compare logits, and one to warm up
    rows = random_rows(tokens, host.kv_heads, host.layers)
    works, sizes, first = [], [], []
    for name in caches:
        step, state, cache = host.step(None if name == HOSTS_OWN else name, rows, capacity)
        sizes.append(kvq.size.nbytes(cache))
        logits, state = jax.block_until_ready(step(state))  # compiles
        works.append(functools.partial(_advance, step, [state]))
        first.append(np.asarray(logits))
    wall, cpu = in_turns(works, rounds, (time.perf_counter, time.process_time))
    return [
        Step(
            host.name,
            name,
            capacity,
            STREAMS,
            sizes[i],
            relative_error(first[i], first[0]),
            tuple(wall[i].round(3).tolist()),
            tuple(cpu[i].round(3).tolist()),
        )
        for i, name in enumerate(caches)
    ]


def _advance(step: Callable[[Any], tuple[Array, Any]], current: list[Any]) -> Any:
    logits, current[0] = step(current[0])
    return logits, current[0]
