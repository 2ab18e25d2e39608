"""`kvq plan`: the best waterfill cache for a budget, from a calibration and config.json alone."""

from __future__ import annotations

import argparse
import bisect
import re
from typing import Any

import kvq_jax as kvq
from kvq_models.calibration.file import Calibration, predicted_divergence, resolved
from kvq_models.inference.method_parameters import check_calibration
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import inputs
from kvq_tools.cli.console import format_bytes, input_errors, print_json
from kvq_tools.cli.tables import print_line, print_table

SHOWN = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0)  # bits of the other lines of the table
FEWEST_BITS, MOST_BITS = 1, 8
METHOD = "waterfill"
_BITS = re.compile(r"(\d+(?:\.\d+)?) *bits?", re.IGNORECASE)

DESCRIPTION = """\
Shares a budget out over the layers, sides and channels of a model, and prints the cache: bits of a stored element, or
the memory of a whole cache at a context and a batch, its full-precision windows included. The widths of channels come from the energies
that a calibration of waterfill holds, so no weights are read and one calibration serves every budget.

The predicted KL is of second order in the errors, for tokens outside the windows: it ranks budgets, and `kvq eval` measures."""

EPILOG = """\
examples:
  kvq calibrate smollm2 --text wiki.txt --cache waterfill --out w.safetensors --samples 2 --length 1024 --dtype float32
  kvq plan smollm2 --calibration w.safetensors --budget 2.5bits
  kvq plan smollm2 --calibration w.safetensors --budget 20MiB --context 8192 --batch 4"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    inputs.add_model(parser)
    parser.add_argument("--calibration", metavar="F", required=True, help="what kvq calibrate wrote for waterfill, with any budget")
    parser.add_argument("--budget", metavar="2.5bits|600MiB", type=budget, required=True, help="bits of an element, or a cache's memory")
    parser.add_argument("--context", metavar="S", type=inputs.positive, help="tokens of a sequence (default: the model's positions)")
    parser.add_argument("--batch", metavar="B", type=inputs.positive, default=1, help="sequences (default: %(default)s)")
    parser.add_argument("--dtype", choices=inputs.DTYPES, default="bfloat16", help="of full-precision rows (default: %(default)s)")


def budget(text: str) -> float | int:
    """Parse --budget: bits as a float, bytes as an int."""
    found = _BITS.fullmatch(text.strip())
    return float(found[1]) if found else inputs.byte_size(text)


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model)
    context = options.context or config.positions
    inputs.warn_beyond(context, config)
    sizes = options.batch, context, options.dtype
    with input_errors():
        calibration = check_calibration(kvq.parse(METHOD), config, options.calibration)
        assert calibration is not None, f"{METHOD} needs a calibration"
        bits = options.budget if isinstance(options.budget, float) else most_bits(options.budget, config, *sizes)
        caches = [described(own, calibration, config, *sizes) for own in sorted({*SHOWN, bits})]
    result = {
        "model": options.model,
        "calibration": options.calibration,
        "budget_bits": options.budget if isinstance(options.budget, float) else None,
        "budget_bytes": options.budget if isinstance(options.budget, int) else None,
        "context": context,
        "batch": options.batch,
        "bf16_bytes": kvq.dense_nbytes(config, options.batch, context),
        "chosen": next(cache["name"] for cache in caches if cache["bits"] == bits),
        "caches": caches,
    }
    print_json("plan", result) if options.json else _print(result)


def most_bits(budget: int, config: LlamaConfig, batch: int, context: int, dtype: str) -> float:
    """Return the most bits whose cache fits so many bytes, to 1/16. Raises ValueError, in one line, where not even the fewest do."""

    def size(sixteenths: int) -> int:
        return kvq.nbytes(kvq.layout(f"{METHOD}:bits={sixteenths / 16}", config, batch, context, dtype))

    choices = range(16 * FEWEST_BITS, 16 * MOST_BITS + 1)
    fitting = bisect.bisect_right(choices, budget, key=size)
    if not fitting:
        raise ValueError(
            f"no cache fits {format_bytes(budget)}: {batch} x {context} tokens take {format_bytes(size(choices[0]))} at the least"
        )
    return choices[fitting - 1] / 16


def described(bits: float, calibration: Calibration, config: LlamaConfig, batch: int, context: int, dtype: str) -> dict[str, Any]:
    """Return the facts about the cache of so many bits."""
    spec = resolved(f"{METHOD}:bits={bits}", calibration)
    return {
        "name": str(spec),
        "bits": bits,
        "body_bits_per_element": kvq.body_bits_per_element(spec, config),
        "bytes": kvq.nbytes(kvq.layout(spec, config, batch, context, dtype)),
        "predicted_kl": predicted_divergence(spec, calibration),
    }


def _print(result: dict[str, Any]) -> None:
    rows = [
        (
            ">" if cache["name"] == result["chosen"] else "",
            f"{cache['body_bits_per_element']:.3f}",
            format_bytes(cache["bytes"]),
            f"{result['bf16_bytes'] / cache['bytes']:.2f}",
            f"{cache['predicted_kl']:.4f}",
        )
        for cache in result["caches"]
    ]
    columns = ("", "stored bits", "cache", "smaller than bf16, times", "predicted KL")
    print_table(f"{METHOD} on {result['model']}, {result['batch']} x {result['context']} tokens", columns, rows, columns[1:])
    print_line("KL in nats per token, to second order, of tokens outside the windows: it ranks budgets; kvq eval measures one")
    print_line(f"use it: kvq generate {result['model']} --prompt P --cache '{result['chosen']}' --calibration {result['calibration']}")
