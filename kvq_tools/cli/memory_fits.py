"""`kvq memory --budget` without a cache: which measured caches fit, from config.json alone."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import kvq_jax as kvq
from kvq_models.calibration.needs import needs
from kvq_models.llama.config import LlamaConfig
from kvq_tools.cli import cache_sizes, inputs
from kvq_tools.cli.console import UserError, format_bytes, print_json, progress
from kvq_tools.cli.tables import print_line, print_table
from kvq_tools.planning import measured
from kvq_tools.planning.measured import EDGES, MeasuredCache, class_in_words

MAX_ROWS = 12
MIN_ROWS = 5  # the smallest caches, if none fits
DENSE = MeasuredCache("dense", kvq.parse("dense"), (0.0,))


def run(options: argparse.Namespace) -> None:
    """List the caches that fit the budget, the best class first and the smallest of each first."""
    if options.budget is None:
        raise UserError(
            "kvq memory needs a cache, --cache kivi:bits=2, or a budget, --budget 24GiB"
        )
    if options.mesh is not None or options.roofline is not None:
        raise UserError("--mesh and --roofline describe a cache: give --cache")
    config = inputs.read_config(options.model)
    context = options.context or config.positions
    inputs.warn_beyond(context, config)
    tables = measured.measurements()
    with progress("counting"):
        caches = [
            cache
            for one in (DENSE, *tables.caches)
            if (cache := _described(one, config, options, context)) is not None
        ]
        if not any(cache["fits"] for cache in caches):
            for cache in _smallest(caches):
                cache["largest_context"] = cache_sizes.largest_context(
                    kvq.parse(cache["cache"]), config, options.batch, options.dtype, options.budget
                )
    caches.sort(key=lambda cache: (_class(cache), cache["resident_bytes"]))
    result = {
        "model": options.model,
        "context": context,
        "batch": options.batch,
        "dtype": options.dtype,
        "budget_bytes": options.budget,
        "bf16_bytes": kvq.size.dense_nbytes(config, options.batch, context),
        "weight_bytes": cache_sizes.weights(config, options.dtype),
        "measured_on": tables.model,
        "texts": list(tables.texts),
        "caches": caches,
    }
    if options.json:
        print_json("fits", result)
    else:
        _print(result, tables, options.budget.text)


def _described(
    cache: MeasuredCache, config: LlamaConfig, options: argparse.Namespace, context: int
) -> dict[str, Any] | None:
    """Return the facts about a cache, or None if this model cannot have it."""
    try:
        size = kvq.size.of(cache.spec, config, options.batch, context, options.dtype)
        calibrated = bool(needs(cache.spec, config))
    except ValueError:
        return None
    return {
        "name": cache.name,
        "cache": str(cache.spec),
        "resident_bytes": size.resident,
        "cache_bytes": size.cache,
        "fits": size.resident <= options.budget,
        "kl": list(cache.kl),
        "kl_class": None if cache is DENSE else cache.kl_class,
        "needs_calibration": calibrated,
        "largest_context": None,
    }


def _class(cache: dict[str, Any]) -> int:
    return -1 if cache["kl_class"] is None else cache["kl_class"]


def _print(result: dict[str, Any], tables: measured.Measurements, budget: str) -> None:
    caches, size = result["caches"], format_bytes(result["budget_bytes"])
    asked = f"{size} for {result['batch']} x {result['context']} tokens"
    fitting = [cache for cache in caches if cache["fits"]]
    if fitting:
        title = f"{len(fitting)} of {len(caches)} measured caches fit {asked}"
        shown = fitting[:MAX_ROWS]
    else:
        title = f"no measured cache fits {asked}; the smallest ones"
        shown = _smallest(caches)
    kl = f"KL, {tables.model}"
    longest = {
        cache["name"]: cache_sizes.context_in_words(cache["largest_context"])
        for cache in ([] if fitting else shown)
    }
    rows = [
        {
            "cache": cache["name"],
            "resident": format_bytes(cache["resident_bytes"]),
            "smaller than bf16, times": f"{result['bf16_bytes'] / cache['resident_bytes']:.1f}",
            **({} if fitting else {"largest context that fits": longest[cache["name"]]}),
            kl: "exact" if cache["kl_class"] is None else class_in_words(cache["kl_class"]),
            "needs": "kvq calibrate" if cache["needs_calibration"] else "",
        }
        for cache in shown
    ]
    print_table(f"{result['model']}: {title}", rows, texts=("cache", kl, "needs"))
    if len(fitting) > len(shown):
        print_line(f"{len(fitting) - len(shown)} more fit, of larger KL: --json lists them.")
    print_line(
        f"KL to full precision in nats per token, on the harder of {len(tables.texts)} texts"
        f" ({tables.windows} windows of each, {tables.scored} tokens scored after {tables.prompt}):"
        " caches of one class are not told apart, and another model has another KL. Resident bytes"
        " are exact, and leave out the weights."
        f" {cache_sizes.weights_in_words(result['weight_bytes'], result['dtype'], result['model'])}"
    )
    print_line(
        f"kvq plan measures on {result['model']} itself. It needs the weights and a text: kvq plan"
        f" {result['model']} --text FILE --budget {shlex.quote(budget)}"
        f" --context {result['context']} --batch {result['batch']}"
    )


def _smallest(caches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the smallest caches that are not of the last class, which is of no use."""
    useful = [cache for cache in caches if cache["kl_class"] != len(EDGES)]
    return sorted(useful, key=lambda cache: cache["resident_bytes"])[:MIN_ROWS]
