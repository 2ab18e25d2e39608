"""Heaps of glibc in a process that runs for months. Other C libraries have neither function, and
then nothing happens (docs/decisions/clients.md)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

M_ARENA_MAX, HEAPS = -8, 2  # of mallopt
SECONDS = 60  # between two trims


def limit() -> None:
    """Let all threads share few heaps. By default each thread takes one, up to eight a core, and
    freed memory is scattered over them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


@contextlib.contextmanager
def trimmed(seconds: float = SECONDS) -> Iterator[None]:
    """Give freed pages back to the system every so many seconds: by itself glibc only shortens a
    heap at its end, and keeps what compiled programs and bursts of requests have left inside."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
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
