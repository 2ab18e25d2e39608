"""`kvq doctor`: explain layer by layer what a cache will do to a model, and warn of known
problems."""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

import kvq_jax as kvq
from kvq_jax.attention import dispatch
from kvq_tools.cli import compilation_cache, doctor_facts, inputs
from kvq_tools.cli.console import print_json
from kvq_tools.cli.doctor_layers import describe_layer
from kvq_tools.cli.doctor_warnings import known_problems
from kvq_tools.cli.tables import print_line, print_table


def run(options: argparse.Namespace) -> None:
    config = inputs.read_config(options.model, options.cache, warn_unmet=False)
    context = options.context or config.positions
    cache = kvq.cache.layout(options.cache.spec, config, 1, context)
    biases = doctor_facts.key_biases(options.model, config)
    calibration, missing = doctor_facts.calibration_state(
        options.model, config, cache.spec, options.calibration
    )
    heads = config.num_attention_heads
    layers = [
        describe_layer(index, plan, cache.spec, heads) | doctor_facts.bias_facts(biases, index)
        for index, plan in enumerate(cache.plans)
    ]
    result = {
        "model": options.model,
        "cache": str(cache.spec),
        "context": context,
        "regions": {
            "sink": cache.spec.sink,
            "recent": cache.spec.recent,
            "block": cache.spec.block,
            "body": cache.spec.regions(context).body_capacity,
        },
        "facts": (
            doctor_facts.facts(config, cache.spec, inputs.raw_config(options.model), biases)
            | {
                "calibration": calibration,
                "kernels here": dispatch.kernels_here(),
                "kernels' arithmetic": dispatch.arithmetic_here(cache.plans, heads),
                "kernels' route": dispatch.route_here(cache.plans, heads),
                "compilation cache": compilation_cache.described(),
            }
        ),
        "layers": layers,
        "warnings": known_problems(config, cache, biases) + missing,
    }
    print_json("doctor", result) if options.json else _print(result, options.cache.text)


def _print(result: dict[str, Any], cache: str) -> None:
    regions = result["regions"]
    print_table(result["model"], ("fact", "value"), list(result["facts"].items()))
    rows = []
    for _, group in groupby(
        result["layers"],
        key=lambda layer: {k: v for k, v in layer.items() if k not in ("layer", "k_proj_bias")},
    ):
        run = list(group)
        first, last = run[0]["layer"], run[-1]["layer"]
        precision = "quantized" if run[0]["quantized"] else "full precision"
        sides = (
            (_side_text(run[0]["kv"]), "from the same rows")
            if "kv" in run[0]
            else (_side_text(run[0]["k"]), _side_text(run[0]["v"]))
        )
        rows.append(
            (
                first if first == last else f"{first}-{last}",
                precision,
                run[0]["reason"] or "",
                *sides,
                *(
                    f"XLA: {run[0][name]}" if run[0][name] else "kernel"
                    for name in ("no_kernel", "no_native_kernel")
                ),
            )
        )
    title = (
        f"{cache} at {result['context']} tokens: {regions['body']} in the body,"
        f" full-precision windows sink {regions['sink']}, recent {regions['recent']}, block"
        f" {regions['block']}"
    )
    print_table(title, ("layers", "is", "because", "keys", "values", "on a GPU", "on a CPU"), rows)
    biases = [
        (layer["layer"], *(f"{value:.3f}" for value in layer["k_proj_bias"].values()))
        for layer in result["layers"]
        if layer["k_proj_bias"]
    ]
    if biases:
        print_table(
            "k_proj bias",
            ("layer", "norm", "largest", "median"),
            biases,
            numeric=("layer", "norm", "largest", "median"),
        )
    for warning in result["warnings"]:
        print_line(f"warning: {warning}")
    if not result["warnings"]:
        print_line("no warnings")


def _side_text(side: dict[str, Any]) -> str:
    options = {
        key: value
        for key, value in side.items()
        if key not in ("codec", "stored_bits", "packing", "channels", "block", "heads", "width")
        and value is not False
    }
    text = ", ".join(key if value is True else f"{key} {value}" for key, value in options.items())
    packing = side.get("packing")
    if packing:
        text += (
            f"; packed in planes of {packing['plane_channels']} channels,"
            f" {packing['tokens_per_word_row']} tokens per word row"
        )
        text += (
            f", {packing['padding_channels']} channels of padding"
            if packing["padding_channels"]
            else ""
        )
    return f"{side['stored_bits']:.2f} bits stored: {text}"
