"""The caches of --cache: each with its text as the user typed it.

A spec is parsed at once. `auto:bits=2.5` and `plan.json` are decided by a plan of the model, which
argparse does not know while it reads --cache. They become PlannedCache values, which `resolve`
replaces before a command runs: by the spec in the file, or by waterfill with the widths that the
model's calibration gives.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import NamedTuple

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_models.inference.method_parameters import check_calibration
from kvq_models.llama import checkpoint
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.planning import kept, unmeasured
from kvq_tools.planning.unmeasured import METHOD

AUTO = "auto"


class NamedCache(NamedTuple):
    """A cache and its text as the user typed it, for output: str(spec) leaves defaults out."""

    text: str
    spec: CacheSpec


@dataclasses.dataclass(frozen=True)
class PlannedCache:
    """A cache that a plan decides: `auto` with its options as a spec, or a plan's file (None)."""

    text: str
    options: CacheSpec | None

    def plan(self, model: str) -> kept.StoredPlan:
        """Return the cache and its calibration.

        Raises UserError or ValueError, in one line, if the file is not a plan, or if `auto` has no
        calibration for the model.
        """
        if self.options is None:
            return kept.read_plan(self.text)
        method = self.options.k
        if dataclasses.replace(method, k_widths=0, v_widths=0) != method:
            raise ValueError(f"--cache {self.text}: auto chooses the widths; give bits and windows")
        file, config = kept.calibration_file(model), checkpoint.read_config(model)
        if not file.is_file():
            raise UserError(
                f"--cache {self.text}: no plan of {model!r} was made yet; `kvq plan {model} --text"
                " FILE --budget 2.5bits` keeps one"
            )
        calibration = check_calibration(self.options, config, str(file))
        assert calibration is not None, f"{METHOD} needs a calibration"
        spec = unmeasured.planned(self.options, calibration, config, config.positions)
        return kept.StoredPlan(spec, str(file))


def parse(text: str) -> NamedCache | PlannedCache:
    """Parse --cache. A plan's file is not opened yet. Raises ValueError, in one line."""
    name, colon, options = text.strip().partition(":")
    if name == AUTO:
        return PlannedCache(text, kvq.parse(METHOD + colon + options))
    if text.endswith(".json"):
        return PlannedCache(text, None)
    return NamedCache(text, kvq.parse(text))


def resolve(options: argparse.Namespace) -> None:
    """Replace planned caches in options.cache by the caches of their plans, and add the
    calibrations of these plans to options.calibration if the command takes any."""
    several = isinstance(options.cache, list)
    caches, calibrations = [], []
    for cache in options.cache if several else [options.cache]:
        if isinstance(cache, PlannedCache):
            with input_errors():
                plan = cache.plan(options.model)
            calibrations += [plan.calibration] if plan.calibration else []
            cache = NamedCache(cache.text, plan.spec)
        caches.append(cache)
    options.cache = caches if several else caches[0]
    if calibrations and hasattr(options, "calibration"):
        if several:
            options.calibration = [*(options.calibration or []), *dict.fromkeys(calibrations)]
        else:
            options.calibration = options.calibration or calibrations[0]
