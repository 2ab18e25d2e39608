"""KL of caches that was measured on a public model, for planning without weights.

measured.json is made from committed results by `python -m benchmarks.results_page`. Windows of a
text tell caches apart within a factor of about three, so KL is given as a class of that width.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

import kvq_jax as kvq

EDGES = (0.003, 0.01, 0.03, 0.1, 0.3)  # between the classes, in nats per token


@dataclasses.dataclass(frozen=True)
class MeasuredCache:
    """A cache by its text, and its mean KL to full precision on each text in nats per token."""

    name: str
    spec: kvq.cache.CacheSpec
    kl: tuple[float, ...]

    @property
    def kl_class(self) -> int:
        """Return the number of EDGES that the KL reaches on the harder text."""
        return sum(max(self.kl) >= edge for edge in EDGES)


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Caches with equal windows, measured on one model."""

    model: str
    texts: tuple[str, ...]
    windows: int
    prompt: int
    scored: int
    caches: tuple[MeasuredCache, ...]


def class_in_words(kl_class: int) -> str:
    """Return the limits of a class, such as "0.01 to 0.03"."""
    if not kl_class:
        return f"below {EDGES[0]:g}"
    if kl_class == len(EDGES):
        return f"{EDGES[-1]:g} or more"
    return f"{EDGES[kl_class - 1]:g} to {EDGES[kl_class]:g}"


@functools.cache
def measurements() -> Measurements:
    """Return the measurements that kvq ships with."""
    file = importlib.resources.files("kvq_tools.planning") / "measured.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    caches = tuple(
        MeasuredCache(row["cache"], kvq.parse(row["cache"]), tuple(row["kl"]))
        for row in fields.pop("caches")
    )
    return Measurements(**(fields | {"texts": tuple(fields["texts"])}), caches=caches)
