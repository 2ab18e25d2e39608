"""The caches of --cache: each with its text as the user typed it.

The options of a command are declared without JAX, so argparse keeps texts. `resolve` replaces them
before a command runs: by the spec that a text is, by the one in a plan's file (plan.json), or by
waterfill with the widths that the model's calibration gives (auto:bits=2.5).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import NamedTuple

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.file import check_calibration
from kvq_models.did_you_mean import with_hint
from kvq_models.llama import open_checkpoint
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.cli.options.values import refusal
from kvq_tools.planning import kept
from kvq_tools.planning.defaults import METHOD, Bases

AUTO = "auto"


class NamedCache(NamedTuple):
    """A cache and its text as the user typed it, for output: str(spec) leaves defaults out."""

    text: str
    spec: CacheSpec


def named(spec: CacheSpec) -> NamedCache:
    """Name a cache that nobody typed, such as the cache of a file: with its bits, which str(spec)
    leaves out if they are the default."""
    text, bits = str(spec), getattr(spec.k, "bits", None)
    if isinstance(bits, int | float) and spec.k == spec.v and "bits=" not in text:
        method, _, options = text.partition(":")
        spelled = f"{method}:bits={bits:g}" + (f",{options}" if options else "")
        with contextlib.suppress(ValueError):  # bits that are not an option
            text = spelled if kvq.parse(spelled) == spec else text
    return NamedCache(text, spec)


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
        from kvq_tools.planning import unmeasured  # imported late: 0.1 s

        bases = Bases.of(method)
        file, config = kept.calibration_file(model, bases), open_checkpoint.read_config(model)
        if not file.is_file():
            command = f"kvq plan {model} --text FILE --budget 2.5bits{bases.flags()}"
            raise UserError(
                f"--cache {self.text}: no plan of {model!r} was made yet; `{command}` keeps one"
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


def _parsed(text: str, command: str) -> NamedCache | PlannedCache:
    try:
        return parse(text)
    except ValueError as error:
        raise refusal(command, "--cache", with_hint(str(error))) from None


def resolve(options: argparse.Namespace) -> None:
    """Replace the texts in options.cache by NamedCache values, and add the calibrations of plans to
    options.calibration if the command takes any. Raises UserError as argparse words it."""
    several = isinstance(options.cache, list)
    caches, calibrations = [], []
    for text in options.cache if several else [options.cache]:
        cache = _parsed(text, options.command)
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
