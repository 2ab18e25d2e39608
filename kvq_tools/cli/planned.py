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
from kvq_models.llama.open_checkpoint import read_config
from kvq_tools.cli.console import UserError, input_errors
from kvq_tools.cli.options.values import refusal
from kvq_tools.planning.defaults import METHOD, Bases
from kvq_tools.planning.kept import StoredPlan, calibration_file, read_plan

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


def resolve(options: argparse.Namespace) -> None:
    """Replace the texts in options.cache by NamedCache values, and add the calibrations of plans to
    options.calibration if the command takes any. Raises UserError as argparse words it."""
    several = isinstance(options.cache, list)
    texts = options.cache if several else [options.cache]
    plans = [_plan(text, options) for text in texts]
    caches = [NamedCache(text, plan.spec) for text, plan in zip(texts, plans, strict=True)]
    options.cache = caches if several else caches[0]
    calibrations = [plan.calibration for plan in plans if plan.calibration]
    if calibrations and hasattr(options, "calibration"):
        if several:
            options.calibration = [*(options.calibration or []), *dict.fromkeys(calibrations)]
        else:
            options.calibration = options.calibration or calibrations[0]


def _plan(text: str, options: argparse.Namespace) -> StoredPlan:
    """Return the cache of a text, and the calibration that a plan names for it."""
    name, colon, settings = text.strip().partition(":")
    if name != AUTO and text.endswith(".json"):
        with input_errors():
            return read_plan(text)
    try:
        spec = kvq.parse(METHOD + colon + settings if name == AUTO else text)
    except ValueError as error:
        raise refusal(options.command, "--cache", str(error)) from None
    if name != AUTO or options.model is None:  # a command without its model refuses that itself
        return StoredPlan(spec, None)
    with input_errors():
        tokens = getattr(options, "capacity", None) or getattr(options, "context", None)
        return _automatic_plan(text, spec, options.model, tokens)


def _automatic_plan(text: str, asked: CacheSpec, model: str, tokens: int | None) -> StoredPlan:
    """Return the cache whose widths the model's calibration gives in sequences of this many tokens,
    by default the model's positions.

    Raises UserError or ValueError, in one line, if there is no calibration for the model, or if
    widths are asked for.
    """
    method = asked.k
    if dataclasses.replace(method, k_widths=0, v_widths=0) != method:
        raise ValueError(f"--cache {text}: auto chooses the widths; give bits and windows")
    from kvq_tools.planning import unmeasured  # imported late: 0.1 s

    bases = Bases.of(method)
    file, config = calibration_file(model, bases), read_config(model)
    if not file.is_file():
        command = f"kvq plan {model} --text FILE --budget 2.5bits{bases.flags()}"
        raise UserError(f"--cache {text}: no plan of {model!r} was made yet; `{command}` keeps one")
    calibration = check_calibration(asked, config, str(file))
    assert calibration is not None, f"{METHOD} needs a calibration"
    spec = unmeasured.planned(asked, calibration, config, tokens or config.positions)
    return StoredPlan(spec, str(file))
