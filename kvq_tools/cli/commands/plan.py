"""`kvq plan`: find the best cache for a budget, from measurements on a text or from a calibration
alone."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvq_jax as kvq
from kvq_jax.cache.spec import CacheSpec
from kvq_models.calibration.file import (
    Calibration,
    calibrated_spec,
    check_calibration,
    predicted_divergence,
)
from kvq_models.calibration.fingerprint import load_calibration
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, interruption, plan_budget, plan_rows, plan_table, text_input
from kvq_tools.cli.console import UserError, bar, input_errors, loading, print_json
from kvq_tools.cli.options.plan import Bits, Budget, Bytes
from kvq_tools.planning import figure, kept, unmeasured
from kvq_tools.planning.code_text import code_text
from kvq_tools.planning.defaults import (
    CODE,
    KEY_BASES,
    LENGTH,
    LONGEST,
    METHOD,
    SAMPLES,
    SCORED,
    VALUE_BASES,
    WINDOW,
    WINDOWS,
    Bases,
)
from kvq_tools.planning.measuring import Checked, Planner, calibrated
from kvq_tools.planning.request import TEXTS, PlanRequest
from kvq_tools.planning.sensitivity import Sensitivity

SHOWN = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)  # bits of the table's other rows


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model)
    _check_needs(options)
    context = options.context or config.positions
    inputs.warn_beyond(context, config)
    if options.picture and (why := figure.missing()):
        raise UserError(why)
    for option in ("out", "picture"):
        if getattr(options, option):
            inputs.output_file(options, option)
    with input_errors():
        budget = plan_budget.budget(options, config)
        bits = plan_budget.budgets(
            budget, _bases(options), config, options.batch, context, options.dtype
        )
    started = time.perf_counter()
    result = {
        "model": options.model,
        "budget_bits": budget.bits if isinstance(budget, Bits) else None,
        "budget_bytes": budget.nbytes if isinstance(budget, Bytes) else None,
        "context": context,
        "batch": options.batch,
        "bf16_bytes": kvq.size.dense_nbytes(config, options.batch, context),
        **(
            _fast(options, config, context, bits)
            if options.text is None or options.fast
            else _measured(options, config, context, bits, budget)
        ),
        "seconds": time.perf_counter() - started,
    }
    if options.out:
        calibration = result["calibration"] if METHOD in result["chosen"] else None
        with input_errors():
            plan = kept.StoredPlan(kvq.parse(result["chosen"]), calibration)
            kept.write_plan(options.out, plan)
    if options.picture:
        with input_errors():
            figure.draw(result, Path(options.picture))
    if options.json:
        print_json("plan", result | {"out": options.out, "picture": options.picture})
    else:
        plan_table.print_plan(result, options)


def _check_needs(options: argparse.Namespace) -> None:
    """If there is no budget, raise a UserError with everything that is missing. Options of
    measurements need a plan that measures."""
    if options.text is None or options.fast:
        for name in ("other_text", "window", "windows"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} needs --text without --fast: no other plan measures")
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
        return None if _kept(options, _bases(options)) else _text_needed(options)


def _kept(options: argparse.Namespace, choices: Sequence[Bases]) -> dict[Bases, str]:
    """Return the calibrations of these bases that earlier plans kept."""
    files = {bases: _folder(options) / kept.file_name(bases) for bases in choices}
    return {bases: str(file) for bases, file in files.items() if file.is_file()}


def _text_needed(options: argparse.Namespace) -> str:
    choices = _bases(options)
    asked = choices[0].flags() if len(choices) == 1 else ""
    of_bases = f" with{asked}" if asked else ""
    where = "" if options.work is None else f" in {options.work!r}"
    return (
        f"--text FILE to measure, or --calibration F: no plan of {options.model!r}{of_bases} was"
        f" made{where} yet"
    )


def _bases(options: argparse.Namespace) -> tuple[Bases, ...]:
    """Return the bases to plan with, by default those of a given calibration, or the usual ones.
    Raises UserError or ValueError, in one line, if they cannot be compared."""
    usual = Bases()
    if options.calibration and Path(options.calibration).is_file():
        usual = Bases.of(calibrated_spec(options.calibration).k)
    asked = []
    for flag, default, every in zip(
        ("key_basis", "value_basis"), usual, (KEY_BASES, VALUE_BASES), strict=True
    ):
        choice = getattr(options, flag)
        asked.append(every if choice == "best" else (choice or default,))
        if choice == "best" and options.calibration is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} best needs a calibration for each basis, and"
                " --calibration is one: leave it out"
            )
    choices = tuple(itertools.starmap(Bases, itertools.product(*asked)))
    unmeasured = options.fast or options.text is None
    if unmeasured and len(choices) > 1 and not all(bases.predicted for bases in choices):
        raise UserError(
            "values in a rotation have no prediction to compare: give --text without --fast, or"
            " --key-basis and --value-basis without best"
        )
    return choices


def _fast(
    options: argparse.Namespace, config: LlamaConfig, context: int, bits: Mapping[Bases, float]
) -> dict[str, Any]:
    """Return the plan that calibrations give by themselves."""
    files = _calibrations(options, config, list(bits))
    caches: list[dict[str, Any]] = []
    best: list[tuple[float, str, str]] = []
    for bases, file in files.items():
        with input_errors():
            calibration = check_calibration(kvq.parse(bases.spec()), config, file)
            assert calibration is not None, f"{METHOD} needs a calibration"
            of_bases = {
                level: _predicted(level, bases, calibration, config, context, options)
                for level in sorted({*SHOWN, bits[bases]})
            }
        caches += of_bases.values()
        chosen = of_bases[bits[bases]]
        # without a prediction it is the only one
        best.append((chosen["predicted_kl"] or 0.0, chosen["name"], file))
    _, chosen, file = min(best)
    return {
        "text": options.text,
        "other_text": None,
        "calibration": file,
        "chosen": chosen,
        "caches": sorted(caches, key=lambda cache: cache["bits"]),
        "prediction": None,
        "sides": [],
    }


def _calibrations(
    options: argparse.Namespace, config: LlamaConfig, choices: Sequence[Bases]
) -> dict[Bases, str]:
    """Return a calibration's file for each choice of bases: made of the text, given, or those that
    earlier plans kept."""
    if options.text is not None:
        return {planner.bases: planner.file for planner in _planners(options, config, choices)}
    if options.calibration is not None:
        return {bases: options.calibration for bases in choices}
    if not (files := _kept(options, choices)):
        raise UserError(f"kvq plan needs {_text_needed(options)}")
    return files


def _measured(
    options: argparse.Namespace,
    config: LlamaConfig,
    context: int,
    bits: Mapping[Bases, float],
    budget: Budget,
) -> dict[str, Any]:
    """Return the plan that measurements on a text give."""
    size = config, options.batch, context, options.dtype

    def fits(spec: CacheSpec) -> bool:
        return plan_budget.fits(budget, spec, *size)

    def resident(bases: Bases) -> int:
        """Return the bytes of the budget, or those that its bits take with the usual windows."""
        if isinstance(budget, Bytes):
            return budget.nbytes
        return kvq.size.of(bases.spec(bits[bases]), *size).resident

    caches: list[dict[str, Any]] = []
    checked: list[tuple[Checked, Planner]] = []
    planners = _planners(options, config, list(bits))
    for planner in planners:
        level = bits[planner.bases]
        with interruption.advised(_advice(_work(options))), input_errors():
            predictions = planner.predictions(planner.costs(), level)
            # other methods are read once
            rivals = fits if planner is planners[0] else lambda _: False
            wider = plan_budget.bits_by_recent(
                resident(planner.bases), planner.request.recents, *size, planner.bases
            )
            best = planner.check(predictions, level, context, rivals, wider)
            others = {
                shown: planner.planned(predictions, shown, context)
                for shown in SHOWN
                if shown != level
            }
        checked += [(one, planner) for one in best]
        caches += [
            plan_rows.described(str(one.spec), shown, *size) | plan_rows.predicted(one.predicted)
            for shown, one in others.items()
        ]
    chosen, planner = min(checked, key=lambda one: one[0].compared)
    if chosen.compared == math.inf:
        raise UserError("the model's predictions are finite through no cache of this budget")
    caches += [
        plan_rows.described(str(one.spec), bits[of.bases], *size) | plan_rows.measured(one, chosen)
        for one, of in checked
    ]
    return {
        "text": options.text,
        "other_text": options.other_text or CODE,
        "calibration": planner.file,
        "chosen": str(chosen.spec),
        "caches": sorted(caches, key=lambda cache: (cache["bits"], cache["measured_kl"] or 0)),
        "prediction": plan_rows.prediction([one for one, _ in checked]),
        "sides": [
            side | {"key_basis": planner.bases.keys, "value_basis": planner.bases.values}
            for planner in planners
            for side in planner.sides
        ],
    }


def _planners(
    options: argparse.Namespace, config: LlamaConfig, choices: Sequence[Bases]
) -> list[Planner]:
    """Check the request, load the model and calibrate for each choice of bases."""
    texts = text_input.read_text(options.text), "" if options.fast else _other_text(options)
    tokenizer = text_input.need_tokenizer(options.model, "read the text")
    ids, other = (np.asarray(text_input.encode(tokenizer, text), np.int32) for text in texts)
    window = min(WINDOW, config.positions) if options.window is None else options.window
    request = PlanRequest(
        ids,
        other,
        window,
        min(config.positions, options.context or config.positions, options.window or LONGEST),
        0 if options.fast else options.windows or WINDOWS,
        SAMPLES,
        min(LENGTH, config.positions),
        config.bos_token_id,
    )
    with input_errors():
        if request.windows and not SCORED < window <= config.positions:
            raise ValueError(
                f"--window {window} must be above {SCORED} and at most the model's"
                f" {config.positions} positions"
            )
        if options.calibration is not None:
            for bases in choices:
                check_calibration(kvq.parse(bases.spec()), config, options.calibration)
        request.check(config)
        work = _work(options)
        work.mkdir(parents=True, exist_ok=True)
    with loading(options.model), input_errors():
        llama, _ = load_llama(options.model, dtype="float32", weights="dense")

    @functools.cache  # one pass of the full-precision model serves all
    def sensitivity() -> Sensitivity:
        rows = np.concatenate([request.rows(text, "sides") for text in TEXTS])
        return Sensitivity(llama, rows, request.prompt)

    def planner(bases: Bases) -> Planner:
        if options.calibration is None:
            file = work / kept.file_name(bases)
            name = Path(options.text).name
            calibration = calibrated(llama, request, bases, file, work, name, bar)
        else:
            file = Path(options.calibration)
            calibration = load_calibration(file, llama, bases.spec())
        return Planner(llama, request, bases, calibration, file, work, sensitivity, bar)

    with interruption.advised(_advice(work)), input_errors():
        return [planner(bases) for bases in choices]


def _folder(options: argparse.Namespace) -> Path:
    """Return the folder of calibrations, which may be read-only for a plan that makes none."""
    return kept.folder(options.model) if options.work is None else Path(options.work)


def _work(options: argparse.Namespace) -> Path:
    return inputs.output_directory(str(_folder(options)), "--work")


def _advice(work: Path) -> str:
    return f"the same command continues from {str(work)!r}"


def _other_text(options: argparse.Namespace) -> str:
    """Return the text of --other-text, by default Python's own sources."""
    if options.other_text is not None:
        return text_input.read_text(options.other_text)
    if (text := code_text()) is None:
        raise UserError("this Python comes without sources to measure on: give --other-text")
    return text


def _predicted(
    bits: float,
    bases: Bases,
    calibration: Calibration,
    config: LlamaConfig,
    context: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the facts about waterfill at a width, as its calibration distributes them."""
    asked = kvq.parse(bases.spec(bits))
    spec = unmeasured.planned(asked, calibration, config, context)
    facts = plan_rows.described(str(spec), bits, config, options.batch, context, options.dtype)
    return facts | plan_rows.predicted((predicted_divergence(spec, calibration), None))
