"""`kvq plan`: find the best cache for a budget, from measurements on a text or from a calibration
alone."""

from __future__ import annotations

import argparse
import bisect
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvq_jax as kvq
from kvq_models.calibration.file import Calibration, predicted_divergence
from kvq_models.inference.method_parameters import check_calibration
from kvq_models.llama.checkpoint import load_llama
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs, interruption, plan_speed, plan_table, resident, text_input
from kvq_tools.cli.console import UserError, bar, format_bytes, input_errors, loading, print_json
from kvq_tools.planning import figure, kept, unmeasured
from kvq_tools.planning.measuring import (
    FACTOR,
    LENGTH,
    MEASURED,
    SAMPLES,
    SCORED,
    WINDOW,
    WINDOWS,
    Checked,
    Planner,
    PlanRequest,
)
from kvq_tools.planning.unmeasured import METHOD

SHOWN = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)  # bits of the table's other rows
FEWEST_BITS, MOST_BITS = 1, 8
_BITS = re.compile(r"(\d+(?:\.\d+)?) *bits?", re.IGNORECASE)

_WIDTHS = ", ".join(f"{bits:g}" for bits in MEASURED)

DESCRIPTION = f"""\
Finds the cache with the least KL to full precision for a budget: bits per
stored element, or resident bytes at a context and a batch (windows and what the
method adds to the model included). Prints the spec for --cache, beside those of
other budgets. It needs a budget and, the first time for a model, a text.

With --text, it measures. waterfill is calibrated on the first half of the text
({SAMPLES} x {LENGTH} tokens). Then every side of every layer is read through the cache by
itself, at {_WIDTHS} bits, on windows of the second half. This gives the
widths of all layers. The best caches of the budget, also of other methods, are
then read as a whole, and the one with the least KL wins. Every number is saved
at once: after Ctrl-C the same command continues, and another budget for the
same model and text measures only its last step.

With --fast or without a text, nothing is measured: widths come from the
energies of waterfill's calibration, which also predicts the KL, to second
order, for tokens outside the windows. This prediction ranks budgets. The
calibration is --calibration, or the one that an earlier plan with a text kept.
--cache auto:bits=2.5 does the same in every command.

--device and --tokens-per-second turn a speed into a budget: the bytes that a
device can read in a step, after the weights, at the peak rate of its memory. No
device is that fast, so a cache that does not fit even then is too large."""

EPILOG = """\
examples:
  kvq plan smollm2 --text wiki.txt --budget 2.5bits --picture front.png
  kvq plan smollm2 --text wiki.txt --budget 20MiB --context 8192 --batch 4 \\
      --out plan.json
  kvq generate smollm2 --prompt "It was" --cache plan.json
  kvq plan smollm2 --budget 3bits       (fast, from what the first command kept)
  kvq plan path/to/model --calibration w.safetensors --device h200 \\
      --tokens-per-second 2000 --context 32768 --batch 32"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    parser.add_argument(
        "--budget",
        metavar="2.5bits|600MiB",
        type=budget,
        help="bits per element, or the resident bytes of a cache",
    )
    parser.add_argument("--text", metavar="FILE", help="a UTF-8 text to calibrate and measure on")
    parser.add_argument(
        "--fast",
        action="store_true",
        help=("with --text: only calibrate on it, and measure nothing"),
    )
    parser.add_argument(
        "--calibration",
        metavar="F",
        help=(
            "a file that `kvq calibrate` wrote for waterfill, with any budget (default: see above)"
        ),
    )
    parser.add_argument(
        "--context",
        metavar="S",
        type=inputs.token_count,
        help="tokens per sequence, such as 4096 or 32K (default: the positions of the model)",
    )
    parser.add_argument(
        "--batch",
        metavar="B",
        type=inputs.positive,
        default=1,
        help="sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=inputs.DTYPES,
        default="bfloat16",
        help="dtype of full-precision rows (default: %(default)s)",
    )
    plan_speed.add(parser)
    parser.add_argument(
        "--window",
        metavar="W",
        type=inputs.positive,
        help=f"tokens per measured window (default: at most {WINDOW})",
    )
    parser.add_argument(
        "--windows",
        metavar="N",
        type=inputs.positive,
        default=WINDOWS,
        help="measured windows (default: %(default)s)",
    )
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="keep calibration and measurements here (default: kvq's cache folder)",
    )
    parser.add_argument(
        "--out",
        metavar="F.json",
        help="write the cache, with the path of its calibration, to a file for --cache",
    )
    parser.add_argument(
        "--picture", metavar="F.png", help=("plot KL against bits (needs matplotlib)")
    )


def budget(text: str) -> float | int:
    """Parse --budget: bits as a float, bytes as an int."""
    if match := _BITS.fullmatch(text.strip()):
        return float(match[1])
    try:
        return inputs.byte_size(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a budget; write 2.5bits, 600MiB or a number of bytes"
        ) from None


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
