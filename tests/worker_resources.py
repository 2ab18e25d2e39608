"""Resources that the processes of a run share and hold: compiled programs on disk, and memory
that is given back, its peak printed at the end.

A program that one test compiled is read by every later test, file and worker from a folder that
lives as long as the run.
"""

import ctypes
import gc
import os
import resource
import sys
import tempfile
from collections import Counter

import jax
import pytest

from benchmarks.resources import resident_bytes

# of the 65530 that Linux allows a process; each compiled program takes several, and past the limit
# LLVM crashes
MAX_MAPPINGS = 20_000
MAX_BYTES = 2600 << 20  # of resident memory at which compiled programs are dropped
MORE_BYTES = (
    300 << 20
)  # beyond what a process still holds after that, before they are dropped again
SETTINGS = {
    "jax_compilation_cache_dir": "",
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,  # lines of source in programs cost a tenth of the run
}
FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()
USE = pytest.StashKey[dict[str, dict[str, int]]]()


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def drop_programs() -> None:
    """Forget what was compiled and traced, and hand the freed memory back to the system."""
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # glibc's


class Resources:
    """The plugin of a process that runs tests."""

    def __init__(self) -> None:
        # traces are many small objects that live long: the usual thresholds cost a tenth of the run
        gc.set_threshold(50_000, 20, 50)
        self.maximum = MAX_BYTES
        self.counts: Counter[str] = Counter()
        jax.monitoring.register_event_listener(self.count)

    def count(self, event: str, **_: object) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            self.counts[event.rpartition("_")[2]] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Drop compiled programs that hold much: by bytes after each test, by mappings, which take
        longer to count, after each file."""
        from kvq_tools.evaluation.program_memory import mappings  # after the options of XLA are set

        if resident_bytes() > self.maximum or (
            (nextitem is None or nextitem.path != item.path) and mappings() > MAX_MAPPINGS
        ):
            drop_programs()
            self.counts["drops"] += 1
            self.maximum = max(MAX_BYTES, resident_bytes() + MORE_BYTES)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        use = {"peak": peak_bytes(), **self.counts}
        worker = getattr(session.config, "workeroutput", None)
        if worker is None:
            session.config.stash[USE]["this process"] = use
        else:
            worker["resources"] = use


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(
        config, "workerinput"
    ):  # the process that a user starts, whose environment its workers have
        config.stash[USE] = {}
        folder = config.stash[FOLDER] = tempfile.TemporaryDirectory(prefix="kvq-tests-")
        for name, value in (SETTINGS | {"jax_compilation_cache_dir": folder.name}).items():
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)
    # JAX locks the folder only if it bounds its size, so a worker may read a program that another
    # one is still writing: it warns, and compiles the program itself
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache entry"
    )
    config.pluginmanager.register(Resources())


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER in config.stash:
        config.stash[FOLDER].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object) -> None:
    """Keep what a worker held, as it says when it ends."""
    node.config.stash[USE][node.gateway.id] = getattr(node, "workeroutput", {}).get("resources", {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, use in sorted(config.stash[USE].items()):
        if "peak" not in use:
            terminalreporter.write_line(f"{name}: ended without saying what it held", red=True)
        elif compiled := use.get("hits", 0) + use.get("misses", 0):
            terminalreporter.write_line(
                f"{name}: at most {use['peak'] / 2**30:.2f} GiB; {compiled} programs,"
                f" {use.get('hits', 0) / compiled:.0%} of them compiled before, dropped"
                f" {use.get('drops', 0)} times"
            )
