"""A process that measures one request. It may run in another environment than kvq's, so this module
imports the standard library alone.

The parent starts one of the modules beside this one, such as with_kvq, with a JSON object. The last
line of its output is the answer, a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

REPEATED, REPEATS = 1024, 3  # prompts of at most REPEATED tokens are read REPEATS times


@dataclasses.dataclass(frozen=True)
class Request:
    """The request to measure.

    way: which cache, weights or precision; each system has its own names.
    model: a GGUF file, or a directory in Hugging Face's format.
    tokens: a JSON file with a list of token ids, of which the prompt is made.
    prompt, steps: tokens of the prompt, and tokens generated after the first.
    cores: processors that the process may use.
    folder: where compiled programs may be kept.
    warm: True to compile the programs and measure nothing.
    """

    way: str
    model: str
    tokens: str
    prompt: int
    steps: int
    cores: int
    folder: str
    warm: bool = False

    def prompt_ids(self) -> list[int]:
        with open(self.tokens, encoding="utf-8") as file:
            ids = json.load(file)
        return (ids * (self.prompt // len(ids) + 1))[: self.prompt]

    @property
    def readings(self) -> int:
        """Return how often the prompt is read, each time into an empty cache."""
        return REPEATS if self.prompt <= REPEATED else 1


def measured_by(measure: Callable[[Request], dict[str, Any]]) -> None:
    """Read the request, use only its processors, and print the answer."""
    request = Request(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-request.cores :])
    answer = measure(request)
    print(json.dumps({**answer, "peak_bytes": peak_bytes()}), flush=True)


def peak_bytes() -> int:
    """Return the most memory that this program had, or 0 if the system does not say. The peak that
    `getrusage` knows begins with the memory of the process that started this one."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            sizes = dict(line.split(":", 1) for line in file)
    except OSError:
        return 0
    return 1024 * int(sizes["VmHWM"].split()[0])


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    start = time.perf_counter()
    work()
    return round(1e3 * (time.perf_counter() - start), 3)


def request_times(
    read_prompt: Callable[[], object],
    next_tokens: Callable[[], object],
    calls: int,
    each: int = 1,
    readings: int = 1,
    reset: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return the times of a request: until the first token, the median of all readings of the
    prompt, and of each later token. `reset` empties the cache before a reading, which does not
    count. `next_tokens` generates `each` tokens, and its first call does not count."""
    first = []
    for _ in range(readings):
        reset()
        first.append(timed(read_prompt))
    next_tokens()
    samples = [round(timed(next_tokens) / each, 4) for _ in range(calls)]
    return {"first_ms": round(statistics.median(first), 3), "samples_ms": samples, "each": each}
