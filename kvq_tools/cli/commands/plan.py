"""`kvq plan`: find the best cache for a budget, from measurements on a text or from a calibration
alone."""

from __future__ import annotations

import argparse
import bisect
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvq_jax as kvq
from kvq_models.calibration.file import Calibration, check_calibration, predicted_divergence
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, interruption, plan_speed, plan_table, resident, text_input
from kvq_tools.cli.console import UserError, bar, format_bytes, input_errors, loading, print_json
from kvq_tools.planning import figure, kept, unmeasured
from kvq_tools.planning.defaults import LENGTH, METHOD, SAMPLES, SCORED, WINDOW
from kvq_tools.planning.measuring import FACTOR, Checked, Planner, PlanRequest

SHOWN = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)  # bits of the table's other rows
FEWEST_BITS, MOST_BITS = 1, 8


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model)
    _check_needs(options)
    context = options.context or config.positions
    inputs.warn_beyond(context, config)
    if options.picture and (why := figure.missing()):
        raise UserError(why)
    for path in filter(None, (options.out, options.picture)):
        if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            raise UserError(f"{path!r} must be a file in a directory that exists")
    with input_errors():
        asked = plan_speed.budget(options, config)
        bits = (
            asked
            if isinstance(asked, float)
            else most_bits(asked, config, options.batch, context, options.dtype)
        )
    started = time.perf_counter()
    result = {
        "model": options.model,
        "budget_bits": options.budget if isinstance(options.budget, float) else None,
        "budget_bytes": asked if isinstance(asked, int) else None,
        "context": context,
        "batch": options.batch,
        "bf16_bytes": kvq.size.dense_nbytes(config, options.batch, context),
        **(
            _fast(options, config, context, bits)
            if options.text is None or options.fast
            else _measured(options, config, context, bits, asked)
        ),
        "seconds": time.perf_counter() - started,
    }
    if options.out:
        spec = kvq.parse(result["chosen"])
        with input_errors():
            kept.write_plan(
                options.out,
                kept.StoredPlan(
                    spec, result["calibration"] if METHOD in result["chosen"] else None
                ),
            )
    if options.picture:
        with input_errors():
            figure.draw(result, Path(options.picture))
    (
        print_json("plan", result | {"out": options.out, "picture": options.picture})
        if options.json
        else plan_table.print_plan(result, options)
    )


def _check_needs(options: argparse.Namespace) -> None:
    """If there is no budget, raise a UserError with everything that is missing."""
    if all(part is None for part in (options.budget, options.device, options.tokens_per_second)):
        budget = "a budget: --budget 2.5bits, --budget 600MiB, or --device with --tokens-per-second"
        raise UserError(
            f"kvq plan needs {'; and '.join(filter(None, [budget, _missing_text(options)]))}"
        )


def _missing_text(options: argparse.Namespace) -> str | None:
    """Return the need for a text in words. None if there is one, or a calibration."""
    if options.text is not None or options.calibration is not None:
        return None
    with input_errors():
        if kept.calibration_file(options.model).is_file():
            return None
    return f"--text FILE to measure, or --calibration F: no plan of {options.model!r} was made yet"


def _fast(
    options: argparse.Namespace, config: LlamaConfig, context: int, bits: float
) -> dict[str, Any]:
    """Return the plan that a calibration gives by itself."""
    file = options.calibration
    if options.text is not None:
        file = _planner(options, config).file
    elif file is None:
        if missing := _missing_text(options):
            raise UserError(f"kvq plan needs {missing}")
        file = str(kept.calibration_file(options.model))
    with input_errors():
        calibration = check_calibration(kvq.parse(METHOD), config, file)
        assert calibration is not None, f"{METHOD} needs a calibration"
        caches = [
            _predicted(level, calibration, config, context, options)
            for level in sorted({*SHOWN, bits})
        ]
    chosen = next(cache["name"] for cache in caches if cache["bits"] == bits)
    return {
        "text": options.text,
        "calibration": file,
        "chosen": chosen,
        "caches": caches,
        "prediction": None,
        "sides": [],
    }


def _measured(
    options: argparse.Namespace, config: LlamaConfig, context: int, bits: float, budget: float | int
) -> dict[str, Any]:
    """Return the plan that measurements on a text give."""

    def fits(spec: kvq.cache.CacheSpec) -> bool:
        size = kvq.size.of(spec, config, options.batch, context, options.dtype)
        return isinstance(budget, float) or size.resident <= budget

    planner = _planner(options, config)
    advice = f"the same command continues from {str(planner.work)!r}"
    with interruption.advised(advice), input_errors():
        costs = planner.costs()
        checked = planner.check(costs, bits, context, fits)
        others = {level: planner.planned(costs, level, context) for level in SHOWN if level != bits}
    facts = {
        level: described(str(spec), level, config, options.batch, context, options.dtype)
        for level, (spec, _) in others.items()
    }
    caches = [
        facts[level] | {"predicted_kl": others[level][1], "measured_kl": None} for level in others
    ]
    caches += [
        described(str(one.spec), bits, config, options.batch, context, options.dtype)
        | {
            "predicted_kl": one.predicted,
            "measured_kl": one.kl,
        }
        for one in checked
    ]
    return {
        "text": options.text,
        "calibration": planner.file,
        "chosen": str(checked[0].spec),
        "caches": sorted(caches, key=lambda cache: (cache["bits"], cache["measured_kl"] or 0)),
        "prediction": prediction(checked),
        "sides": planner.sides,
    }


def prediction(checked: list[Checked]) -> dict[str, Any]:
    """Return the largest factor between a prediction and its measurement, and whether predictions
    are only good for ranking."""
    factors = [
        max(one.kl / one.predicted, one.predicted / one.kl)
        for one in checked
        if one.predicted and one.kl > 0
    ]
    largest = max(factors, default=1.0)
    return {"factor": largest, "ranks_only": largest > FACTOR}


def _planner(options: argparse.Namespace, config: LlamaConfig) -> Planner:
    """Check the request, load the model and calibrate."""
    text = text_input.read_text(options.text)
    ids = text_input.encode(text_input.need_tokenizer(options.model, "read the text"), text)
    window = min(WINDOW, config.positions) if options.window is None else options.window
    request = PlanRequest(
        np.asarray(ids, np.int32), window, options.windows, SAMPLES, min(LENGTH, config.positions)
    )
    with input_errors():
        if window > config.positions or window <= SCORED:
            raise ValueError(
                f"--window {window} must be above {SCORED} and at most the model's"
                f" {config.positions} positions"
            )
        request.check(config)
        work = Path(options.work) if options.work else kept.folder(options.model)
        work.mkdir(parents=True, exist_ok=True)
    with loading(options.model), input_errors():
        llama, _ = load_llama(options.model, dtype="float32", weights="dense")
    with (
        interruption.advised(f"the same command continues from {str(work)!r}"),
        input_errors(),
    ):
        return Planner(llama, request, work, options.calibration, Path(options.text).name, bar)


def most_bits(budget: int, config: LlamaConfig, batch: int, context: int, dtype: str) -> float:
    """Return the most bits whose resident bytes fit, to 1/16. Raises ValueError, in one line, if
    not even the fewest do."""

    def size(sixteenths: int) -> int:
        spec = f"{METHOD}:bits={sixteenths / 16}"
        return kvq.size.of(spec, config, batch, context, dtype).resident

    choices = range(16 * FEWEST_BITS, 16 * MOST_BITS + 1)
    fitting = bisect.bisect_right(choices, budget, key=size)
    if not fitting:
        raise ValueError(
            f"no cache fits {format_bytes(budget)}: {batch} x {context} tokens take"
            f" {format_bytes(size(choices[0]))} at the least"
        )
    return choices[fitting - 1] / 16


def described(
    name: str, bits: float, config: LlamaConfig, batch: int, context: int, dtype: str
) -> dict[str, Any]:
    """Return the facts about a cache that follow from its layout."""
    return {
        "name": name,
        "bits": bits,
        "body_bits_per_element": kvq.size.body_bits_per_element(name, config, context),
        "bytes": kvq.size.nbytes(kvq.cache.layout(name, config, batch, context, dtype)),
        "resident_by_batch": resident.by_batch(name, config, context, dtype, batch),
    }


def _predicted(
    bits: float,
    calibration: Calibration,
    config: LlamaConfig,
    context: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the facts about waterfill with so many bits, as its calibration distributes them."""
    spec = unmeasured.planned(kvq.parse(f"{METHOD}:bits={bits}"), calibration, config, context)
    facts = described(str(spec), bits, config, options.batch, context, options.dtype)
    return facts | {"predicted_kl": predicted_divergence(spec, calibration), "measured_kl": None}
