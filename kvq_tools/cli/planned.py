"""`--cache plan.json` and `--cache auto:bits=2.5`: caches that a plan decided, with the calibration
that they need.

argparse knows no model while it reads --cache, so such a text is noted there, and `settle` puts the
cache in its place before a command runs: the file's spec, or waterfill with the widths that the
model's kept calibration gives.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import NamedTuple

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.file import resolved
from kvq_models.inference.method_parameters import check_calibration
from kvq_models.llama import checkpoint
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.planning import kept

AUTO, METHOD = "auto", "waterfill"
_noted: list[tuple[CacheSpec, str]] = []  # the objects that stand for a text until it is settled


class NamedCache(NamedTuple):
    """A cache and its text as the user wrote it, for tables: str(spec) leaves defaults out."""

    text: str
    spec: CacheSpec


def read(text: str) -> CacheSpec:
    """Parse --cache: a spec, `auto` with options of waterfill, or a plan's file, which is not
    opened yet. ValueError, in one line."""
    name, colon, options = text.strip().partition(":")
    if name != AUTO and not text.endswith(".json"):
        return kvq.parse(text)
    spec = kvq.parse(METHOD + colon + options if name == AUTO else "dense")
    _noted.append((spec, text))
    return spec


def settle(options: argparse.Namespace) -> None:
    """Put what was noted in its place: specs in options.cache, and their calibrations in
    options.calibration, if a command takes any.

    Raises UserError where `auto` has no calibration for the model, or a file is no plan.
    """
    noted, given = list(_noted), options.cache
    _noted.clear()
    calibrations: list[str] = []

    def settled(spec: CacheSpec) -> CacheSpec:
        text = next((text for own, text in noted if own is spec), None)
        if text is None:
            return spec
        with input_errors():
            plan = (
                _automatic(text, spec, options.model)
                if text.strip().startswith(AUTO)
                else kept.read_plan(text)
            )
        calibrations.extend([plan.calibration] if plan.calibration else [])
        return plan.spec

    if isinstance(given, list):
        options.cache = [one._replace(spec=settled(one.spec)) for one in given]
    elif isinstance(given, CacheSpec):
        options.cache = settled(given)
    if not calibrations or not hasattr(options, "calibration"):
        return
    if isinstance(given, list):
        options.calibration = [*(options.calibration or []), *dict.fromkeys(calibrations)]
    else:
        options.calibration = options.calibration or calibrations[0]


def _automatic(text: str, spec: CacheSpec, model: str) -> kept.StoredPlan:
    """Return the cache that a model's kept calibration gives."""
    if dataclasses.replace(spec.k, k_widths=0, v_widths=0) != spec.k:
        raise ValueError(f"--cache {text}: auto chooses the widths; give bits and windows")
    file, config = kept.calibration_file(model), checkpoint.read_config(model)
    if not file.is_file():
        raise UserError(
            f"--cache {text}: no plan of {model!r} was made yet; `kvq plan {model} --text FILE"
            " --budget 2.5bits` keeps one"
        )
    calibration = check_calibration(spec, config, str(file))
    assert calibration is not None, f"{METHOD} needs a calibration"
    return kept.StoredPlan(resolved(spec, calibration), str(file))
