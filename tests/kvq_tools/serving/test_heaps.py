"""The threads of a server share few heaps, and freed memory goes back to the system."""

import ctypes
import platform
import subprocess
import sys

import pytest

from kvq_tools.serving import heaps

COUNT = """
import ctypes, threading
from kvq_tools.serving import heaps
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if {limited}:
    heaps.limit()
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = libc.fopen(b"{path}", b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc counts its heaps")
def test_the_threads_of_a_server_share_few_heaps(tmp_path):
    counts = []
    for limited in (False, True):
        path = tmp_path / f"{limited}.xml"
        program = COUNT.format(limited=limited, path=path)
        subprocess.run([sys.executable, "-c", program], check=True)
        counts.append(path.read_text().count("<heap nr="))
    free, shared = counts
    assert shared <= heaps.HEAPS < free


FREED = """
import ctypes, time
from kvq_tools.serving import heaps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap from being shortened
    libc.free(block)
before = resident()
with heaps.trimmed({seconds}):
    time.sleep(0.5)
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed pages")
def test_freed_pages_go_back_to_the_system():
    returned = []
    for seconds in (60, 0.1):
        program = FREED.format(seconds=seconds)
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        returned.append(int(done.stdout))
    kept, trimmed = returned
    assert trimmed > 80 > 20 > kept, returned


CYCLES = """
import gc, weakref
from kvq_tools.cli import process
from kvq_tools.serving import heaps

class Node:
    pass

stays = [[] for _ in range(400_000)]
gc.set_threshold(*process.COLLECTED_AFTER)  # as a command does
if {settled}:
    heaps.settle()
first = Node()
first.itself, old = first, weakref.ref(first)
gc.collect(1)  # the cycle is alive, and then too old for the frequent collections
del first
new = [[] for _ in range(90_000)]
print(old() is None)
"""


def test_old_cycles_are_found_soon_although_much_was_loaded():
    answers = []
    for settled in (False, True):
        command = [sys.executable, "-c", CYCLES.format(settled=settled)]
        answers.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert answers == ["False\n", "True\n"]


@pytest.mark.parametrize("error", heaps.MISSING)
def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch, error: type[Exception]):
    asked = []

    def missing(name: None) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr(ctypes, "CDLL", missing)
    heaps.limit()
    with heaps.trimmed():
        pass
    assert asked == [None, None]
