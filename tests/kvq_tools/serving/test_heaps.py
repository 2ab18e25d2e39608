"""The threads of a server share few heaps, so that freed memory is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kvq_tools.cli.commands.serve import HEAPS

COUNT = """
import ctypes, threading
from kvq_tools.cli.commands import serve
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if {limited}:
    serve._limit_heaps()
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
    assert shared <= HEAPS < free
