"""The memory of a process that runs for months (docs/decisions/clients.md). C libraries other than
glibc lack the functions for their heaps, and then nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator

MISSING = OSError, AttributeError, TypeError  # TypeError: ctypes.CDLL(None) under Windows
M_ARENA_MAX, HEAPS = -8, 2  # arguments of mallopt
SECONDS = 60  # time between two trims
COLLECTED_AFTER = 700, 10, 10  # Python's defaults


def limit() -> None:
    """Let all threads share few heaps. By default each thread takes one, up to eight a core, and
    freed memory is scattered over them."""
    with contextlib.suppress(*MISSING):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


def settle() -> None:
    """Tell Python that the objects of now stay, and let it collect garbage as often as by default,
    which a command does not (cli/process.py). It looks for old cycles only if a quarter of all
    objects is new: with JAX's half a million, after hours."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts the objects that are left, which the next quarter is taken of
    gc.set_threshold(*COLLECTED_AFTER)


@contextlib.contextmanager
def trimmed(seconds: float = SECONDS) -> Iterator[None]:
    """Give freed pages back to the system at intervals: by itself glibc only shortens a
    heap at its end, and keeps what compiled programs and bursts of requests have left inside."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except MISSING:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            trim(ctypes.c_size_t(0))  # without Python's lock

    thread = threading.Thread(target=run, name="kvq-trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(1)
