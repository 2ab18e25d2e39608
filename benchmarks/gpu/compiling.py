"""Programs compiled side by side, and handed on as soon as they are ready, or, to be timed, when
no other is being compiled."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

COMPILING = 0.7  # of the time that is left: the most that the compilation of a batch may take
THREADS = max(
    1, min(12, (os.cpu_count() or 1) - 2)
)  # programs compiled at a time, beside a core for the process that times them


def as_compiled(
    compile: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    until: float = float("inf"),
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, compile(item)) of the first item that is ready, again and again.

    With one thread, items keep their order. Ends at `until`, on the clock of time.monotonic:
    compilations that have not begun are dropped, and running ones are left behind (`leave`).
    """
    if threads == 1:
        for item in items:
            if time.monotonic() >= until:
                return
            yield item, compile(item)
        return
    pool, waiting, rest = (
        concurrent.futures.ThreadPoolExecutor(threads),
        list[tuple[Item, concurrent.futures.Future]](),
        list(items),
    )
    try:
        while (waiting or rest) and time.monotonic() < until:
            while rest and len(waiting) < 2 * threads:  # programs that wait to be timed hold memory
                waiting.append((rest[0], pool.submit(compile, rest.pop(0))))
            ready = next((pair for pair in waiting if pair[1].done()), None)
            if ready is None:
                left = until - time.monotonic()
                futures = [future for _, future in waiting]
                concurrent.futures.wait(
                    futures,
                    None if left == float("inf") else left,
                    concurrent.futures.FIRST_COMPLETED,
                )
                continue
            waiting.remove(ready)
            yield ready[0], ready[1].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compiled_first(
    compile: Callable[[Item], Result],
    batches: Iterable[tuple[object, Iterable[Item]]],
    threads: int,
    until: float = float("inf"),
    ready: Callable[[Item], None] = lambda item: None,
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, compile(item)) of each batch once all of the batch are compiled, until `until`.

    So no compiler runs beside a measurement. Compilers try out kernels on the same GPU and keep the
    host from launching in time: on an H100 they made times several times as long.

    Args:
        batches: pairs of a key and items, as itertools.groupby returns them.
        ready: is told of each item as soon as it is compiled.
    """
    for _, batch in batches:
        now, compiled = time.monotonic(), list[tuple[Item, Result]]()
        for item, result in as_compiled(
            compile, list(batch), threads, now + COMPILING * (until - now)
        ):
            ready(item)
            compiled.append((item, result))
        for pair in compiled:
            if time.monotonic() < until:
                yield pair


def leave(status: int) -> NoReturn:
    """End the process now. A usual end waits for every thread that still compiles, and one may take
    minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
