"""Every kind of fault, by name, with the number of injections of a whole run."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from benchmarks.faults.outcome import Kind

CONTROLS = 40  # injections without what protects kvq


class Listed(NamedTuple):
    """tries: of a whole run. place: MODULE:NAME of the kind, or of what makes it from `arguments`.
    without: what the control switches off. preloaded: it runs with the library of short reads."""

    tries: int
    place: str
    without: str
    arguments: tuple = ()
    preloaded: bool = False

    def kind(self) -> Kind:
        module, _, name = self.place.partition(":")
        function = getattr(importlib.import_module(f"benchmarks.faults.{module}"), name)
        return function(*self.arguments) if self.arguments else function


CHECKSUM, ANOTHER = "checksums are not verified", "digits are edited, and count as wrong"
STOPPED, IN_PLACE = "the server's process is stopped", "files are written in place"


def _stored(name: str, tries: int, without: str) -> Listed:
    return Listed(tries, "stored:damage_of", without, (name,))


KINDS = {
    "prefix files": Listed(250, "live:prefix_files", CHECKSUM),
    "prefixes in memory": Listed(250, "live:prefix_memory", CHECKSUM),
    "live caches, sealed bits": Listed(
        150, "live:live_memory", "nothing is verified", (99, 1.0, False)
    ),
    "live caches, any bit": Listed(150, "live:live_memory", "nothing is verified", (1, 0.01, True)),
    "caches and prefilled prompts": _stored("caches and prefilled prompts", 2500, CHECKSUM),
    "calibrations": _stored("calibrations", 2000, CHECKSUM),
    "weights that kvq saved": _stored("weights that kvq saved", 300, CHECKSUM),
    "configurations": _stored("configurations", 400, ANOTHER),
    "tokenizers": _stored("tokenizers", 200, ANOTHER),
    "GGUF files": _stored("GGUF files", 600, ANOTHER),
    "plans": _stored("plans", 1000, ANOTHER),
    "prompts": _stored("prompts", 300, ANOTHER),
    "short reads": Listed(
        300, "stored:short_reads", "a read is taken for a whole one", preloaded=True
    ),
    "kill -9 at a random moment": Listed(600, "processes:kills", IN_PLACE, (False,)),
    "kill -9 at any call": Listed(600, "processes:kills", IN_PLACE, (True,)),
    "full disk": Listed(500, "processes:full_disk", IN_PLACE),
    "compiled programs": Listed(100, "processes:compilation_cache", "programs are exchanged"),
    "clock jumps": Listed(60, "live:clock_jumps", "prefixes of other prompts are given"),
    "vanished clients": Listed(300, "clients:vanished_clients", STOPPED),
    "slow clients": Listed(150, "clients:slow_clients", STOPPED),
    "malformed requests": Listed(2000, "clients:malformed_requests", "fields are not checked"),
}
