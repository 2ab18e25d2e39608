"""Programs are handed on as they are ready: a slow compilation holds up nothing else, and time that
is up drops what is left."""

from __future__ import annotations

import threading
import time

from benchmarks.gpu.compiling import as_compiled


def test_what_is_ready_does_not_wait_for_what_is_slow():
    released = threading.Event()

    def compile(name: str) -> str:
        if name == "slow":
            assert released.wait(60)
        return name.upper()

    found = []
    for item, result in as_compiled(compile, ["slow", "a", "b", "c", "d", "e"], threads=2):
        found.append((item, result))
        if len(found) == 5:
            released.set()
    assert found[-1] == ("slow", "SLOW"), "the slow one came first, or something waited for it"
    assert sorted(found[:-1]) == [(name, name.upper()) for name in "abcde"]


def test_time_that_is_up_leaves_the_rest():
    released = threading.Event()
    start = time.monotonic()
    found = [
        item
        for item, _ in as_compiled(
            lambda item: item == 0 or released.wait(60), [0, 1, 2, 3], threads=2, until=start + 0.5
        )
    ]
    assert found == [0]
    assert time.monotonic() - start < 10, "it waited for what is slow"
    released.set()
    assert list(as_compiled(str, [1, 2], threads=1, until=start)) == []
